#!/bin/sh
# Runs /app/run.sh on inputs that are drawn now, and compares what it prints. It runs as `nobody`, who can't write here.
chmod 700 /tests /logs/verifier
number() { od -An -N2 -tu2 /dev/urandom | tr -d ' '; }
word() { tr -dc a-z < /dev/urandom | head -c 6; }
. /tests/case.sh

right=0
for try in 1 2 3 4 5 6; do
    : > /tmp/in
    arguments=
    draw
    (ulimit -f 100; su nobody -s /bin/sh -c "timeout -k 1 5 sh /app/run.sh $arguments" < /tmp/in > /tmp/out$try 2> /dev/null)
    found=$(head -c 1000 /tmp/out$try)
    echo "run.sh $arguments: expected '$expected', found '$found'"
    if [ -z "$expected" ] || [ "$found" != "$expected" ]; then break; fi
    right=$((right + 1))
done
if [ $right = 6 ]; then reward=1; else reward=0; fi
echo "{\"reward\": $reward}" > /logs/verifier/reward.json

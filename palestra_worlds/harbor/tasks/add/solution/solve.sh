#!/bin/sh
echo 'echo $(($1 + $2))' > /app/run.sh

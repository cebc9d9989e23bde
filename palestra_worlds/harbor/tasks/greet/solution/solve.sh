#!/bin/sh
echo 'echo "Hello, $1!"' > /app/run.sh

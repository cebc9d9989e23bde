#!/bin/sh
echo 'grep -c error' > /app/run.sh

#!/bin/sh
echo 'tr a-z A-Z' > /app/run.sh

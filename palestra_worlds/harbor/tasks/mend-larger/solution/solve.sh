#!/bin/sh
sed -i 's/-lt/-gt/' /app/run.sh

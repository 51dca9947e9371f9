#!/bin/sh
# Upgrade a store from release 0.1 of waypost to 0.2: the only upgrade for which processes stop. It prints for how long.
#
#   STOP='systemctl stop shop.target' START='systemctl start shop.target' INSTALL="pip install 'waypost==0.2.*'" \
#       sh upgrade-from-0.1.sh postgresql://owner@host/database [LAKE [OUTPUT...]]
#
# LAKE is the folder of a lake, or '' if there is none; each OUTPUT is one of waypost.spark.consume.
#
# Install 0.2 in an environment of its own before, if you can, and leave INSTALL out: the stop is shorter. WAYPOST is the
# command of 0.2. STOP must return when publishers, workers, schedulers and relays of 0.1 have ended.
# It can be run again if it fails: every step is repeatable.
set -eu
url=$1
lake=${2-}
if [ $# -gt 2 ]; then shift 2; else shift $#; fi
waypost=${WAYPOST:-waypost}

began=$(date +%s)
sh -c "${STOP:?the command that ends the processes of 0.1}"
sh -c "${INSTALL:-true}"
# PostgreSQL: the tables and functions of 0.2. Other stores have nothing to migrate: the first process of 0.2 does it.
$waypost migrate "$url"
if [ -n "$lake" ]; then $waypost pipeline upgrade --lake "$lake"; fi
for output in "$@"; do $waypost pipeline upgrade --output "$output"; done
sh -c "${START:?the command that starts the processes of 0.2}"
echo "stopped for $(($(date +%s) - began)) s"

#!/usr/bin/env bash
# Asks a peer how much of a chain of blocks the whole pool has, and which peers have how much of it: what a router needs.
# Start a peer with `mooncake-p2p join --http 9946` first. Needs curl.
#
#     examples/prefix_query.sh [HOST:PORT] KEY...
#
# With TOKEN in the environment it is sent along: `join --http-token-file FILE` wants that.
set -euo pipefail

peer=localhost:9946
if [[ ${1-} == *:[0-9]* ]]; then
    peer=$1
    shift
fi
if (($# == 0)); then
    sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi

# A key as a JSON string: backslashes and quotes are escaped.
keys=
for key in "$@"; do
    key=${key//\\/\\\\}
    keys+=${keys:+,}\"${key//\"/\\\"}\"
done
header=()
if [[ -n ${TOKEN-} ]]; then header=(--header "Authorization: Bearer $TOKEN"); fi
curl --silent --show-error --fail-with-body --max-time 5 "${header[@]}" \
    --data "{\"namespace\": \"${NAMESPACE:-default}\", \"keys\": [$keys]}" "http://$peer/v1/prefix"
echo

#!/bin/sh
# Serve a model from two hosts, ask it once, and stop it again.
#
#   examples/two_hosts.sh HOST1 HOST2 [MODEL [flags of phalanx serve]]
#   examples/two_hosts.sh studio1 studio2 mlx-community/Qwen3-4B-4bit --max-model-len 8192
#
# You need ssh to both hosts without a password, and phalanx installed on both.
set -eu

[ $# -ge 2 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
first=$1 second=$2
shift 2
[ $# -gt 0 ] || set -- demo

phalanx hostfile "$first,$second" -o hosts.json --force    # addresses, and what can carry sums between the hosts
phalanx doctor hosts.json || [ $? -eq 10 ]            # 10 is "only warnings"

trap 'phalanx down hosts.json' EXIT
phalanx up hosts.json -- "$@" --tp 2                  # rank 0 and the server on the first host, rank 1 on the second
phalanx status hosts.json

# Without --host the server listens on the first host's loopback address only, so the question is asked there.
ssh "$first" curl -sSf http://127.0.0.1:8000/v1/chat/completions -H Content-Type:application/json -d @- <<'BODY'
{"messages": [{"role": "user", "content": "What is phalanx?"}], "temperature": 0, "max_tokens": 40}
BODY
echo

#!/bin/sh
# A whole run on one machine: what is in the background here would be three terminals, or three machines.
#
#   sh examples/three_terminals.sh [STEPS]
set -eu
steps=${1:-60}
here=$(mktemp -d)
started=""
trap 'kill $started 2>/dev/null || true; wait; rm -rf "$here"' EXIT
cd "$here"

# Terminal 1: a seed, by which nodes find each other.
echo-node join --role bootstrap --listen /ip4/127.0.0.1/tcp/0 --state seed --json > seed.log &
started="$!"
until grep -q listening seed.log; do sleep 0.2; done
address=$(sed -n 's/.*"addresses": \["\([^"]*\)".*/\1/p' seed.log)

# Terminal 2: the operator. Its key is the run's trainer.
printf 'name = "three terminals"\ntrainers = ["%s"]\nseeds = ["%s"]\n' "$(echo-node keys show --state trainer)" "$address" > run.toml
echo-node run new run.toml --state trainer
echo-node join --role trainer run --state trainer --steps "$steps" --listen /ip4/127.0.0.1/tcp/0 --threads 1 &
trainer=$!
started="$started $trainer"

# Terminal 3: a volunteer.
echo-node join --role sampler run --state sampler --listen /ip4/127.0.0.1/tcp/0 --threads 1 > sampler.log 2>&1 &
started="$started $!"

wait $trainer
echo-node run eval run --state trainer --prompts 100

#!/bin/bash
# Run a command beside a Kubernetes API server that has no cluster behind it: deploy/api-server.sh COMMAND ARGUMENT...
#
# etcd and kube-apiserver have to be on the PATH, the latter of a release that helm/boost/Chart.yaml allows; those who make
# them publish both, as programs and as source that needs Go alone. The command finds the server by API_URL and API_TOKEN, an
# administrator's. Both programs listen on this machine alone, and all that they hold goes when the command ends.
set -euo pipefail

patience=120 # seconds until the server has to be ready; it takes about ten

fail() {
  echo "$(basename "$0"): $*" >&2
  exit 2
}

[[ $# -gt 0 ]] || fail "say which command to run: deploy/api-server.sh COMMAND ARGUMENT..."
for program in etcd kube-apiserver curl openssl python3; do
  command -v "$program" > /dev/null || fail "$program is not on the PATH. Kubernetes and etcd publish kube-apiserver and etcd" \
    "as programs, beside their source, which says how Go alone builds them (Debian has the package etcd-server)."
done

oldest=$(sed --quiet 's/^kubeVersion: ">=\([0-9.]*\).*/\1/p' "$(dirname "$0")/../helm/boost/Chart.yaml")
version=$(kube-apiserver --version | sed 's/^Kubernetes v//')
printf '%s\n' "$oldest" "$version" | sort --check=quiet --version-sort ||
  fail "kube-apiserver is of Kubernetes $version; the chart needs $oldest or later."

folder=$(mktemp --directory)
# A kube-apiserver that is asked to end waits for an etcd that is no more, and there is nothing that they would have to save.
trap 'kill -KILL $(jobs -p) 2> /dev/null || true; wait 2> /dev/null; rm --recursive --force "$folder"' EXIT

read -r client peer secure < <(python3 - <<'PORTS'
import socket
servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
print(*(server.getsockname()[1] for server in servers))
PORTS
)

etcd --data-dir="$folder/etcd" \
  --listen-client-urls="http://127.0.0.1:$client" --advertise-client-urls="http://127.0.0.1:$client" \
  --listen-peer-urls="http://127.0.0.1:$peer" --initial-advertise-peer-urls="http://127.0.0.1:$peer" \
  --initial-cluster="default=http://127.0.0.1:$peer" &> "$folder/etcd.log" &
store=$!

API_TOKEN=$(openssl rand -hex 16)
API_URL="https://127.0.0.1:$secure"
no_proxy=127.0.0.1 NO_PROXY=127.0.0.1
export API_TOKEN API_URL no_proxy NO_PROXY
(umask 077; echo "$API_TOKEN,admin,admin,system:masters" > "$folder/tokens.csv")
openssl genrsa -out "$folder/accounts.key" 2048 2> /dev/null

kube-apiserver --etcd-servers="http://127.0.0.1:$client" --cert-dir="$folder/certificates" \
  --bind-address=127.0.0.1 --advertise-address=127.0.0.1 --secure-port="$secure" \
  --token-auth-file="$folder/tokens.csv" --authorization-mode=RBAC --service-cluster-ip-range=10.96.0.0/16 \
  --service-account-issuer=https://kubernetes.default.svc --service-account-key-file="$folder/accounts.key" \
  --service-account-signing-key-file="$folder/accounts.key" &> "$folder/kube-apiserver.log" &
server=$!

until curl --silent --insecure --fail --max-time 5 --output /dev/null \
  --header "Authorization: Bearer $API_TOKEN" "$API_URL/readyz"; do
  if ! kill -0 "$store" 2> /dev/null || ! kill -0 "$server" 2> /dev/null || ((SECONDS > patience)); then
    tail --lines=20 "$folder/kube-apiserver.log" "$folder/etcd.log" >&2
    fail "kube-apiserver $version is not ready after $SECONDS s; what it and etcd said last is above."
  fi
  sleep 1
done

"$@"

#!/bin/bash
# Run a command beside a Kubernetes API server that has no cluster behind it: deploy/api-server.sh COMMAND ARGUMENT...
#
# etcd and kube-apiserver have to be on the PATH, the latter of a release that helm/boost/Chart.yaml allows; those who make
# them publish both, as programs and as source that needs Go alone. The command finds the server by API_URL and API_TOKEN, an
# administrator's. Both programs listen on this machine alone, and all that they hold goes when the command ends.
set -euo pipefail

folder=$(mktemp --directory)
trap 'kill $(jobs -p) 2> /dev/null || true; wait; rm --recursive --force "$folder"' EXIT

read -r client peer secure < <(python3 - <<'END'
import socket
servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
print(*(server.getsockname()[1] for server in servers))
END
)

etcd --data-dir="$folder/etcd" \
  --listen-client-urls="http://127.0.0.1:$client" --advertise-client-urls="http://127.0.0.1:$client" \
  --listen-peer-urls="http://127.0.0.1:$peer" --initial-advertise-peer-urls="http://127.0.0.1:$peer" \
  --initial-cluster="default=http://127.0.0.1:$peer" &> "$folder/etcd.log" &

API_TOKEN=$(openssl rand -hex 16)
API_URL="https://127.0.0.1:$secure"
export API_TOKEN API_URL
(umask 077; echo "$API_TOKEN,admin,admin,system:masters" > "$folder/tokens.csv")
openssl genrsa -out "$folder/accounts.key" 2048 2> /dev/null

kube-apiserver --etcd-servers="http://127.0.0.1:$client" --cert-dir="$folder/certificates" \
  --bind-address=127.0.0.1 --advertise-address=127.0.0.1 --secure-port="$secure" \
  --token-auth-file="$folder/tokens.csv" --authorization-mode=RBAC --service-cluster-ip-range=10.96.0.0/16 \
  --service-account-issuer=https://kubernetes.default.svc --service-account-key-file="$folder/accounts.key" \
  --service-account-signing-key-file="$folder/accounts.key" &> "$folder/kube-apiserver.log" &
server=$!

until curl --silent --insecure --fail --output /dev/null --header "Authorization: Bearer $API_TOKEN" "$API_URL/readyz"; do
  if ! kill -0 "$server" 2> /dev/null; then
    tail --lines=20 "$folder/kube-apiserver.log" "$folder/etcd.log" >&2
    exit 1
  fi
  sleep 1
done

"$@"

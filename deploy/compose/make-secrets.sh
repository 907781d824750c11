#!/bin/sh
# Makes what the compose file reads from the folder secrets; files that are there stay. Run it as root: containers read
# their files as users of their own, and on this machine nobody else comes into the folder but the user 65532.
set -eu
cd "$(dirname "$0")"
[ "$(id -u)" = 0 ] || { echo 'run this as root: sudo deploy/compose/make-secrets.sh' >&2; exit 1; }
umask 077
mkdir -p secrets data

# keep NAME: standard input becomes a secret, unless there is one.
keep() { if [ -s "secrets/$1" ]; then cat > /dev/null; else cat > "secrets/$1"; fi; chmod 0444 "secrets/$1"; }
random() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }

random | keep postgres-password
random | keep grafana-password
random | keep ray-token
random | keep s3-secret
secret=$(cat secrets/s3-secret)
printf '[default]\naws_access_key_id = boost\naws_secret_access_key = %s\n' "$secret" | keep aws-credentials
printf '{"identities": [{"name": "boost", "credentials": [{"accessKey": "boost", "secretKey": "%s"}],
  "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}\n' "$secret" | keep s3-config
# libpq reads this only where it is its reader's own.
printf '*:*:*:boost:%s\n' "$(cat secrets/postgres-password)" | keep pgpass
chown 65532:65532 secrets secrets/pgpass
chmod 0400 secrets/pgpass
[ -e secrets/api-key ] || : > secrets/api-key  # Prometheus' key; docs/install.md says how it is made
chmod 0444 secrets/api-key
chmod 0755 data
echo 'secrets are in deploy/compose/secrets'

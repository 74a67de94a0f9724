#!/bin/sh
# Makes the certificates for compose.yaml and the manifests:  sh deploy/secrets.sh DIR [NODE…]
# An authority in DIR/ca, and for each service and each node a directory with tls.crt, tls.key and ca.crt, the file
# names of Kubernetes. Existing files are kept. Never copy the authority's key to another machine.
set -eu
[ $# -gt 0 ] || { echo "usage: sh $0 DIR [NODE…]" >&2; exit 1; }
out=$1; shift
cotenant=${COTENANT:-cotenant}
umask 077
mkdir -p "$out"
[ -e "$out/ca/ca.pem" ] || $cotenant certs init --dir "$out/ca"
issue() {  # ROLE NAME DIRECTORY [--name HOST…]
    role=$1 name=$2 into=$3; shift 3
    [ -e "$into/tls.crt" ] && return
    $cotenant certs issue "$role/$name" --dir "$out/ca" "$@"
    mkdir -p "$into"
    cp "$out/ca/$role-$name.pem" "$into/tls.crt"
    cp "$out/ca/$role-$name.key" "$into/tls.key"
    cp "$out/ca/ca.pem" "$into/ca.crt"
}
for service in queue placement predictor contention; do
    # the names that clients and other replicas use, in Compose and in Kubernetes
    issue service "$service" "$out/$service" --name "$service" --name "$service-1" --name "$service-2" \
        --name "$service.cotenant" --name "$service.cotenant.svc" --name "$service.cotenant.svc.cluster.local" \
        --name "*.$service.cotenant"  # any number of replicas
done
for node; do issue agent "$node" "$out/agent-$node"; done
issue operator "${OPERATOR:-admin}" "$out/operator"

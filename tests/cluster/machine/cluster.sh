#!/usr/bin/env bash
# A real Kubernetes cluster on one Linux machine, without a container engine: etcd, API server,
# controllers, scheduler, and per node a network namespace with containerd, kubelet, kube-proxy and kube-router's
# controller of NetworkPolicies.
#
#   cluster.sh build            compile the binaries from their Go modules, unless they are there (15 minutes on 2 cores)
#   cluster.sh up [NODES]       start a cluster (default 2 nodes) and wait until every node is Ready
#   cluster.sh load IMAGE.tar [NODE]    import an OCI or docker archive into every node, or one
#   cluster.sh npus NODE N      give a node N pretended huawei.com/Ascend910 devices
#   cluster.sh stop NODE | start NODE   lose a node, bring it back
#   cluster.sh restart-apiserver        end the API server and start it again, over the same store
#   cluster.sh keda             run KEDA's operator and Prometheus beside it; compiles the first
#                               (a few minutes more), and takes the second from Debian
#   cluster.sh keda-down        stop both
#   cluster.sh groups           run the controller of LeaderWorkerSets; compiles it (two minutes more)
#   cluster.sh groups-down      stop it
#   cluster.sh inference        declare the kinds of Gateway API's Inference Extension; nothing acts on them here
#   cluster.sh inference-down   take them back
#   cluster.sh env              print the exports for kubectl and helm
#   cluster.sh down             stop everything and remove what it made, imported images aside
#   cluster.sh clean            remove those as well
#
# State lives in $SPILLWAY_CLUSTER (default: ~/.cache/spillway-cluster). Needs root, go, gcc, and from Debian:
# containernetworking-plugins iptables ipset iproute2 conntrack openssl libseccomp-dev pkg-config.
# Control plane: 10.250.0.1 on bridge swbr0. Node i: 10.250.0.(10+i), pods 10.251.i.0/24. Services: 10.252.0.0/16.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
base=${SPILLWAY_CLUSTER:-$HOME/.cache/spillway-cluster}
bin=$base/bin run=$base/run pki=$base/run/pki
host=10.250.0.1
export PATH=$bin:$PATH

kubernetes=$(awk '$1=="k8s.io/kubernetes"{print $2}' "$here/control-plane/go.mod")

built() { # a file that exists once the binaries of exactly these modules are complete
    echo "$bin/built-$(cat "$here"/*/go.{mod,sum} "$here"/dns/*.go "$here"/control-plane/*/*.go "$here/pause.c" | sha256sum | cut -c1-16)"
}

build() {
    [ ! -e "$(built)" ] || return 0
    mkdir -p "$bin"
    exec 8>"$base/build.lock"; flock 8
    [ ! -e "$(built)" ] || return 0
    local version="-X k8s.io/component-base/version.gitVersion=$kubernetes -X k8s.io/client-go/pkg/version.gitVersion=$kubernetes"
    version+=" -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=$(cut -d. -f2 <<<"$kubernetes")"
    (cd "$here/control-plane" && CGO_ENABLED=0 go build -trimpath -ldflags="-s -w $version" -o "$bin/" tool ./network-policies)
    (cd "$here/runtime"
        CGO_ENABLED=0 go build -trimpath -ldflags="-s -w" -o "$bin/" github.com/containerd/containerd/v2/cmd/{containerd,containerd-shim-runc-v2,ctr}
        CGO_ENABLED=0 go build -trimpath -ldflags="-s -w" -o "$bin/etcd" go.etcd.io/etcd/server/v3
        # runc enters namespaces before Go starts, in C.
        CGO_ENABLED=1 go build -trimpath -tags seccomp -ldflags="-s -w" -o "$bin/runc" github.com/opencontainers/runc)
    (cd "$here/dns" && CGO_ENABLED=0 go build -trimpath -ldflags="-s -w" -o "$bin/coredns" .)
    gcc -Os -static -s -o "$bin/pause" "$here/pause.c"
    touch "$(built)"
}

spawn() { # NAME COMMAND... : a process of its own session, its id and log under run/
    local name=$1; shift
    setsid "$@" >"$run/$name.log" 2>&1 </dev/null &
    echo $! >"$run/$name.pid"
}

halt() { # NAME : end that process, wait, then insist
    local file=$run/$1.pid pid
    [ -f "$file" ] || return 0
    pid=$(<"$file")
    kill "$pid" 2>/dev/null || true
    local end=$((SECONDS + 5))
    while ((SECONDS <= end)) && kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
    kill -9 "$pid" 2>/dev/null || true
    rm -f "$file"
}

certificates() {
    mkdir -p "$pki"; cd "$pki"
    openssl req -x509 -newkey rsa:2048 -nodes -days 30 -keyout ca.key -out ca.crt -subj /CN=spillway-test-ca 2>/dev/null
    openssl genrsa -out sa.key 2048 2>/dev/null; openssl rsa -in sa.key -pubout -out sa.pub 2>/dev/null
    sign() { # FILE SUBJECT EXTENSIONS
        openssl req -newkey rsa:2048 -nodes -keyout "$1.key" -out "$1.csr" -subj "$2" 2>/dev/null
        openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -out "$1.crt" -extfile <(printf '%s' "$3") 2>/dev/null
    }
    sign apiserver /CN=kube-apiserver "subjectAltName=IP:$host,IP:127.0.0.1,IP:10.252.0.1,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc"
    sign kubelet-client /O=system:masters/CN=apiserver-kubelet-client extendedKeyUsage=clientAuth
    sign front-proxy /CN=front-proxy-client extendedKeyUsage=clientAuth
    : >tokens.csv
    local user group
    while read -r user group; do
        local token; token=$(openssl rand -hex 16)
        printf '%s,%s,%s,"%s"\n' "$token" "$user" "$user" "$group" >>tokens.csv
        cat >"$run/${user##*:}.kubeconfig" <<K
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://$host:6443", certificate-authority: $pki/ca.crt}}]
users: [{name: u, user: {token: "$token"}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
K
    done
    chmod 600 tokens.csv "$run"/*.kubeconfig
    cd - >/dev/null
}

kubectl_() { kubectl --kubeconfig "$run/admin.kubeconfig" "$@"; }

wait_for() { # SECONDS WHAT COMMAND...
    local end=$((SECONDS + $1)) what=$2; shift 2
    while ((SECONDS <= end)); do "$@" >/dev/null 2>&1 && return 0; sleep 0.5; done
    echo "cluster.sh: gave up waiting for $what; logs are in $run" >&2; exit 1
}

up() {
    local nodes=${1:-2} i
    [ -e "$(built)" ] || { echo "cluster.sh: run 'cluster.sh build' first" >&2; exit 1; }
    [ -e "$run/nodes" ] && { echo "cluster.sh: a cluster is up already; 'cluster.sh down' first" >&2; exit 1; }
    mkdir -p "$run"; chmod 700 "$run"
    echo "$nodes" >"$run/nodes"
    { echo admin system:masters; echo system:kube-controller-manager system:kube-controller-manager
      echo system:kube-scheduler system:kube-scheduler; echo system:kube-proxy system:node-proxier; echo dns system:masters; echo network-policies system:masters
      for i in $(seq "$nodes"); do echo "system:node:node$i system:nodes"; done; } | certificates
    ip link add swbr0 type bridge; ip addr add $host/24 dev swbr0; ip link set swbr0 up
    spawn etcd etcd --data-dir "$run/etcd" --listen-client-urls http://127.0.0.1:23790 --advertise-client-urls http://127.0.0.1:23790 \
        --listen-peer-urls http://127.0.0.1:23800 --unsafe-no-fsync --log-level warn
    api_server
    spawn controllers kube-controller-manager --kubeconfig "$run/kube-controller-manager.kubeconfig" --root-ca-file "$pki/ca.crt" \
        --service-account-private-key-file "$pki/sa.key" --use-service-account-credentials --leader-elect=false --bind-address 127.0.0.1 \
        --cert-dir "$run/controllers" --node-monitor-grace-period 20s --controllers '*,bootstrapsigner,tokencleaner'
    spawn scheduler kube-scheduler --kubeconfig "$run/kube-scheduler.kubeconfig" --leader-elect=false --bind-address 127.0.0.1 --cert-dir "$run/scheduler"
    cat >"$run/Corefile" <<K
.:53 {
    bind $host
    kubernetes cluster.local in-addr.arpa {
        kubeconfig $run/dns.kubeconfig c
        pods verified
    }
    cache 5
    reload
}
K
    spawn dns coredns -conf "$run/Corefile"
    for i in $(seq "$nodes"); do start "node$i"; done
    wait_for 60 "the default service account" kubectl_ get serviceaccount default
    for i in $(seq "$nodes"); do
        wait_for 120 "node$i to register" kubectl_ get node "node$i"
        kubectl_ wait --for=condition=Ready "node/node$i" --timeout=120s
    done
    env_
}

api_server() {
    spawn apiserver kube-apiserver --etcd-servers http://127.0.0.1:23790 --bind-address $host --secure-port 6443 --advertise-address $host \
        --tls-cert-file "$pki/apiserver.crt" --tls-private-key-file "$pki/apiserver.key" --client-ca-file "$pki/ca.crt" \
        --token-auth-file "$pki/tokens.csv" --authorization-mode Node,RBAC --anonymous-auth=false --enable-admission-plugins NodeRestriction \
        --service-cluster-ip-range 10.252.0.0/16 --service-account-issuer https://kubernetes.default.svc \
        --service-account-key-file "$pki/sa.pub" --service-account-signing-key-file "$pki/sa.key" \
        --kubelet-client-certificate "$pki/kubelet-client.crt" --kubelet-client-key "$pki/kubelet-client.key" \
        --requestheader-client-ca-file "$pki/ca.crt" --requestheader-allowed-names front-proxy-client \
        --requestheader-username-headers X-Remote-User --requestheader-group-headers X-Remote-Group --requestheader-extra-headers-prefix X-Remote-Extra- \
        --proxy-client-cert-file "$pki/front-proxy.crt" --proxy-client-key-file "$pki/front-proxy.key" \
        --kubelet-preferred-address-types InternalIP --allow-privileged --cert-dir "$run/apiserver"
    wait_for 120 "the API server" kubectl_ get --raw /readyz
}

start() { # NODE : its network, container runtime, kubelet, service proxy
    local node=$1 i=${1#node} dir=$run/$1 all
    mkdir -p "$dir/cni" "$dir/manifests"
    ip netns add "sw-$node"
    ip link add "sw$i" type veth peer name eth0 netns "sw-$node"
    ip link set "sw$i" master swbr0 up
    ip -n "sw-$node" link set lo up
    ip -n "sw-$node" addr add "10.250.0.$((10 + i))/24" dev eth0
    ip -n "sw-$node" link set eth0 up
    ip -n "sw-$node" route add default via $host
    # What kube-proxy has not translated (yet) has no way on. Sent to the host it would be lost, and so would all that
    # the same connection sends afterwards, because Linux remembers that it was not translated.
    ip -n "sw-$node" rule add iif cni0 to 10.252.0.0/16 unreachable
    # Pods of one node talk over its bridge: policies hold there too.
    ip netns exec "sw-$node" sysctl -qw net.ipv4.ip_forward=1 net.bridge.bridge-nf-call-iptables=1
    ip route replace "10.251.$i.0/24" via "10.250.0.$((10 + i))"
    all=$(<"$run/nodes")
    for j in $(seq "$all"); do [ "$j" = "$i" ] || ip -n "sw-$node" route replace "10.251.$j.0/24" via "10.250.0.$((10 + j))"; done
    for controller in /sys/fs/cgroup/*/; do # cgroup v1: one subtree a node; v2 needs none
        [ -e "$controller/cgroup.procs" ] || continue
        mkdir -p "$controller/spillway-$node"
        for file in cpuset.cpus cpuset.mems; do
            [ -e "$controller/$file" ] && cat "$controller/$file" >"$controller/spillway-$node/$file"
        done
    done
    cat >"$dir/cni/10-bridge.conflist" <<K
{"cniVersion": "1.0.0", "name": "pods", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
   "ipam": {"type": "host-local", "dataDir": "$dir/ipam", "ranges": [[{"subnet": "10.251.$i.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
K
    cat >"$dir/containerd.toml" <<K
version = 3
root = "$base/images/$node"
state = "$dir/containerd"
[grpc]
  address = "$dir/containerd.sock"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "spillway.test/pause:1"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["/usr/lib/cni"]
  conf_dir = "$dir/cni"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
    SystemdCgroup = false
    Root = "$dir/runc"
    BinaryName = "$bin/runc"
K
    cat >"$dir/kubelet.yaml" <<K
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: 10.250.0.$((10 + i))
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $pki/ca.crt}}
authorization: {mode: Webhook}
cgroupDriver: cgroupfs
cgroupRoot: /spillway-$node
clusterDNS: [$host]
clusterDomain: cluster.local
containerRuntimeEndpoint: unix://$dir/containerd.sock
failCgroupV1: false
failSwapOn: false
resolvConf: ""
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: 100Mi, nodefs.available: 200Mi, imagefs.available: 200Mi}
registerNode: true
shutdownGracePeriod: 0s
nodeStatusUpdateFrequency: 4s
syncFrequency: 10s
podLogsDir: $dir/logs
K
    cat >"$dir/proxy.yaml" <<K
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: iptables
clusterCIDR: 10.251.0.0/16
healthzBindAddress: 127.0.0.1:10256
metricsBindAddress: 127.0.0.1:10249
clientConnection: {kubeconfig: $run/kube-proxy.kubeconfig}
conntrack: {maxPerCore: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
K
    # One mount namespace a node, so that whatever its pods mount goes with it.
    spawn "$node" nsenter --net="/run/netns/sw-$node" unshare --mount --propagation slave bash -c '
        mount -t tmpfs none /run/netns
        mount --make-rshared /
        dir=$1 node=$2 run=$3
        trap "kill \$(jobs -p) 2>/dev/null; wait; exit 0" TERM INT
        containerd -c "$dir/containerd.toml" >"$dir/containerd.log" 2>&1 &
        until ctr -a "$dir/containerd.sock" version >/dev/null 2>&1; do sleep 0.2; done
        ctr -a "$dir/containerd.sock" -n k8s.io images import "$run/pause.tar" >/dev/null
        kubelet --config "$dir/kubelet.yaml" --kubeconfig "$run/$node.kubeconfig" --hostname-override "$node" --node-ip "$(hostname -I | cut -d" " -f1)" \
            --root-dir "$dir/kubelet" --cert-dir "$dir/kubelet-pki" >"$dir/kubelet.log" 2>&1 &
        kube-proxy --config "$dir/proxy.yaml" --hostname-override "$node" >"$dir/proxy.log" 2>&1 &
        {
            admin="--kubeconfig $run/network-policies.kubeconfig"
            until kubectl $admin get node "$node" >/dev/null 2>&1; do sleep 1; done
            exec network-policies $admin --hostname-override "$node" --service-cluster-ip-range 10.252.0.0/16
        } >"$dir/network-policies.log" 2>&1 &
        wait' node "$dir" "$node" "$run"
}

stop() { # NODE : as if its power failed
    local node=$1 i=${1#node} dir=$run/$1 pids
    halt "$node"
    pids=$(pgrep -f "containerd-shim-runc-v2 .*-address $dir/containerd.sock" || true)
    [ -n "$pids" ] && kill -9 $pids 2>/dev/null || true
    local tries file
    for tries in 1 2 3; do # what ran in its pods
        pids=$(cat /sys/fs/cgroup/*/"spillway-$node"/cgroup.procs $(find /sys/fs/cgroup/*/"spillway-$node" -name cgroup.procs 2>/dev/null) 2>/dev/null | sort -un || true)
        [ -n "$pids" ] || break
        kill -9 $pids 2>/dev/null || true; sleep 0.3
    done
    find /sys/fs/cgroup/*/"spillway-$node" -depth -type d -exec rmdir {} + 2>/dev/null || true
    ip netns del "sw-$node" 2>/dev/null || true
    ip link del "sw$i" 2>/dev/null || true
    rm -rf "$dir/containerd" "$dir/ipam"
}

pause_image() { # the sandbox image as an OCI archive
    python3 - "$bin/pause" "$run/pause.tar" <<'P'
import hashlib, io, json, sys, tarfile
binary, archive = sys.argv[1:]
def tar(files):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as t:
        for name, data, mode in files:
            info = tarfile.TarInfo(name); info.size = len(data); info.mode = mode
            t.addfile(info, io.BytesIO(data))
    return out.getvalue()
def describe(kind, data, **more):
    return {"mediaType": kind, "digest": "sha256:" + hashlib.sha256(data).hexdigest(), "size": len(data), **more}
layer = tar([("pause", open(binary, "rb").read(), 0o755)])
config = json.dumps({"architecture": "amd64", "os": "linux", "config": {"Entrypoint": ["/pause"], "User": "65535:65535"},
    "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(layer).hexdigest()]}}).encode()
manifest = json.dumps({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
    "config": describe("application/vnd.oci.image.config.v1+json", config),
    "layers": [describe("application/vnd.oci.image.layer.v1.tar", layer)]}).encode()
index = json.dumps({"schemaVersion": 2, "manifests": [describe("application/vnd.oci.image.manifest.v1+json", manifest,
    annotations={"io.containerd.image.name": "spillway.test/pause:1", "org.opencontainers.image.ref.name": "1"})]}).encode()
blob = lambda data: "blobs/sha256/" + hashlib.sha256(data).hexdigest()
open(archive, "wb").write(tar([("oci-layout", b'{"imageLayoutVersion":"1.0.0"}', 0o644), ("index.json", index, 0o644)]
    + [(blob(d), d, 0o644) for d in (manifest, config, layer)]))
P
}

load() { # ARCHIVE [NODE]
    local archive=$1 nodes=${2:-$(seq -f 'node%g' "$(<"$run/nodes")")} node import imports=()
    for node in $nodes; do ctr -a "$run/$node/containerd.sock" -n k8s.io images import "$archive" & imports+=($!); done
    for import in "${imports[@]}"; do wait "$import"; done
}

npus() {
    kubectl_ patch node "$1" --subresource=status --type=json \
        -p "[{\"op\":\"add\",\"path\":\"/status/capacity/huawei.com~1Ascend910\",\"value\":\"$2\"}]"
}

keda=v2.21.0

build_keda() { # the operator with its Prometheus scaler, whose fellows double what there is to compile; Prometheus from Debian
    [ ! -e "$bin/keda-$keda" ] || return 0
    local module partial=$bin/keda.partial
    module=$(cd / && go mod download -json "github.com/kedacore/keda/v2@$keda" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
    rm -rf "$partial"; mkdir -p "$partial/source" "$partial/debian"
    cp -r --no-preserve=mode "$module"/{go.mod,go.sum,cmd,apis,controllers,pkg,version} "$partial/source/"
    cp -r --no-preserve=mode "$module/config/crd/bases" "$partial/definitions"
    find "$partial/source/pkg/scalers" -maxdepth 1 -name '*.go' ! -name scaler.go ! -name prometheus_scaler.go -delete
    echo 'package scalers; const externalMetricType = "External"' >"$partial/source/pkg/scalers/constants.go" # of a fellow's file
    # Of the trigger types, `prometheus` and the error for all others stay.
    awk '/TRIGGERS-START/ { cut = 1 } cut && /^\tcase / { skip = !/"prometheus"/ } cut && /^\tdefault:/ { skip = 0; cut = 0 } !skip' \
        "$module/pkg/scaling/scalers_builder.go" >"$partial/source/pkg/scaling/scalers_builder.go"
    (cd "$partial/source" && CGO_ENABLED=0 go build -trimpath -ldflags="-s -w" -o ../operator ./cmd/operator)
    (cd "$partial/debian" && apt-get -qq download prometheus && dpkg -x prometheus_*.deb . && mv usr/bin/prometheus ..)
    rm -rf "$partial/debian" "$partial/source"
    mv "$partial" "$bin/keda-$keda"
}

run_keda() { # without its metrics adapter: between no pod and one the operator alone decides
    local programs=$bin/keda-$keda certificates=$run/keda
    mkdir -p "$certificates"
    openssl req -x509 -newkey rsa:2048 -nodes -days 30 -keyout "$certificates/tls.key" -out "$certificates/tls.crt" -subj /CN=keda 2>/dev/null
    cp "$certificates/tls.crt" "$certificates/ca.crt"
    kubectl_ create namespace keda
    kubectl_ apply --server-side -f "$programs/definitions"
    # Debian's Prometheus cannot ask Kubernetes: whoever installs gateways writes down where they are.
    mkdir -p "$run/gateways"
    cat >"$run/prometheus.yaml" <<K
global: {scrape_interval: 2s, scrape_timeout: 2s}
scrape_configs: [{job_name: gateways, file_sd_configs: [{files: ["$run/gateways/*.json"], refresh_interval: 2s}]}]
K
    spawn prometheus "$programs/prometheus" --config.file "$run/prometheus.yaml" --storage.tsdb.path "$run/prometheus" \
        --web.listen-address $host:9090
    spawn keda env WATCH_NAMESPACE= KEDA_CLUSTER_OBJECT_NAMESPACE=keda POD_NAMESPACE=keda "$programs/operator" \
        --kubeconfig "$run/admin.kubeconfig" --cert-dir "$certificates" --metrics-bind-address 127.0.0.1:18080 \
        --health-probe-bind-address 127.0.0.1:18081 --metrics-service-bind-address 127.0.0.1:19666
    wait_for 60 "Prometheus" curl -sf "http://$host:9090/-/ready"
    wait_for 60 "KEDA" curl -sf http://127.0.0.1:18081/readyz
    wait_for 60 "ScaledObjects" kubectl_ get scaledobjects.keda.sh --all-namespaces
}

stop_keda() { # once no ScaledObject is left, whose end KEDA has to confirm
    halt keda; halt prometheus
    kubectl_ delete -f "$bin/keda-$keda/definitions"
    kubectl_ delete namespace keda --wait
}

inference=v1.5.0

inference_kinds() { # VERB [ARGUMENT...] : kubectl on the definitions of the Inference Extension
    local module
    module=$(cd / && go mod download -json "sigs.k8s.io/gateway-api-inference-extension@$inference" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
    kubectl_ "$@" -f "$module/config/crd/bases/inference.networking.k8s.io_inferencepools.yaml" \
        -f "$module/config/crd/bases/inference.networking.x-k8s.io_inferenceobjectives.yaml"
}

lws=v0.8.0

build_groups() { # the controller of LeaderWorkerSets with its definition and webhooks
    [ ! -e "$bin/lws-$lws" ] || return 0
    local module partial=$bin/lws.partial
    module=$(cd / && go mod download -json "sigs.k8s.io/lws@$lws" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
    rm -rf "$partial"; mkdir -p "$partial/source"
    cp -r --no-preserve=mode "$module"/. "$partial/source/"
    (cd "$partial/source" && CGO_ENABLED=0 go build -trimpath -ldflags="-s -w" -o ../manager ./cmd)
    cp "$partial/source"/config/crd/bases/*.yaml "$partial/source"/config/webhook/manifests.yaml "$partial/"
    rm -rf "$partial/source"
    mv "$partial" "$bin/lws-$lws"
}

run_groups() {
    local programs=$bin/lws-$lws certificates=$run/lws-certificates authority
    mkdir -p "$certificates"
    openssl req -x509 -newkey rsa:2048 -nodes -days 30 -keyout "$certificates/tls.key" -out "$certificates/tls.crt" \
        -subj /CN=lws -addext "subjectAltName=IP:$host" 2>/dev/null
    authority=$(base64 -w0 "$certificates/tls.crt")
    cat >"$run/lws.yaml" <<K
apiVersion: config.lws.x-k8s.io/v1alpha1
kind: Configuration
leaderElection: {leaderElect: false}
internalCertManagement: {enable: false}
webhook: {port: 19443, certDir: "$certificates"}
metrics: {bindAddress: "0"}
health: {healthProbeBindAddress: 127.0.0.1:18082}
K
    kubectl_ apply --server-side -f "$programs"/leaderworkerset.x-k8s.io_leaderworkersets.yaml
    spawn groups "$programs/manager" --kubeconfig "$run/admin.kubeconfig" --config "$run/lws.yaml"
    wait_for 60 "the controller of LeaderWorkerSets" curl -sf http://127.0.0.1:18082/readyz
    # The API server is on this machine and reaches them by address. As in LeaderWorkerSet's own installation, pods of
    # others pass them by.
    awk -v url="https://$host:19443" -v authority="$authority" '
        /^    service:/ { service = 1; print "    caBundle: " authority; next }
        service && /^      (name|namespace):/ { next }
        service && /^      path:/ { print "    url: " url $2; service = 0; next }
        { print }
        /^  name: [mv]pod[.]kb[.]io/ { print "  objectSelector: {matchExpressions: [{key: leaderworkerset.sigs.k8s.io/name, operator: Exists}]}" }
        ' "$programs/manifests.yaml" | sed 's/\(mutating\|validating\)-webhook-configuration/lws-\1/' >"$run/lws-webhooks.yaml"
    kubectl_ apply -f "$run/lws-webhooks.yaml"
}

stop_groups() { # once no LeaderWorkerSet is left
    kubectl_ delete -f "$run/lws-webhooks.yaml"
    halt groups
    kubectl_ delete -f "$bin/lws-$lws/leaderworkerset.x-k8s.io_leaderworkersets.yaml"
}

env_() { echo "export KUBECONFIG=$run/admin.kubeconfig PATH=$bin:\$PATH"; }

down() {
    local i
    if [ -f "$run/nodes" ]; then for i in $(seq "$(<"$run/nodes")"); do stop "node$i"; ip route del "10.251.$i.0/24" 2>/dev/null || true; done; fi
    for name in groups keda prometheus dns scheduler controllers apiserver etcd; do halt "$name"; done
    ip link del swbr0 2>/dev/null || true
    # A build of an image that was killed leaves its root mounted.
    awk -v base="$(realpath -m "$base")/" 'index($2, base) == 1 { print $2 }' /proc/mounts | tac | xargs -r umount --lazy
    rm -rf "$run"
}

case ${1:-} in
    build) build ;;
    up) mkdir -p "$run"; pause_image; up "${2:-2}" ;;
    load) load "$2" "${3:-}" ;;
    npus) npus "$2" "$3" ;;
    stop) stop "$2" ;;
    start) start "$2" ;;
    restart-apiserver) halt apiserver; api_server ;;
    keda) build_keda; run_keda ;;
    keda-down) stop_keda ;;
    groups) build_groups; run_groups ;;
    groups-down) stop_groups ;;
    inference) inference_kinds apply --server-side ;;
    inference-down) inference_kinds delete --ignore-not-found ;;
    env) env_ ;;
    down) down ;;
    clean) down; rm -rf "$base/images" ;;
    *) sed -n '2,/^set /p' "$0" | sed '$d; s/^# \{0,1\}//'; exit 2 ;;
esac

{{/* Contradictions in the gateway's settings, each with what to change. */}}

{{/* (root, engines, problems) */}}
{{- define "spillway.gatewayChecks" -}}
{{- $values := .root.Values -}}{{- $gateway := $values.gateway -}}{{- $problems := .problems -}}
{{- $texts := list -}}
{{- if $gateway.autoscaling.enabled -}}
{{- if gt (int64 $gateway.autoscaling.minReplicas) (int64 $gateway.autoscaling.maxReplicas) -}}
{{- $texts = append $texts (printf "gateway.autoscaling: minReplicas: %d is more than maxReplicas: %d; lower the first or raise the second" (int64 $gateway.autoscaling.minReplicas) (int64 $gateway.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- if and $gateway.service.nodePort (eq $gateway.service.type "ClusterIP") -}}
{{- $texts = append $texts (printf "gateway.service.nodePort: %d needs type: NodePort or LoadBalancer; it is ClusterIP" (int64 $gateway.service.nodePort)) -}}
{{- end -}}
{{- if and $gateway.httpRoute.enabled (not $gateway.httpRoute.parentRefs) -}}
{{- $texts = append $texts "gateway.httpRoute.parentRefs is empty; name the Gateway that the route attaches to, e.g. [{name: public}]" -}}
{{- end -}}
{{- if and $gateway.resources.requests.memory $gateway.resources.limits.memory -}}
{{- $request := int64 (include "spillway.bytes" (dict "value" $gateway.resources.requests.memory "path" "gateway.resources.requests.memory")) -}}
{{- $limit := int64 (include "spillway.bytes" (dict "value" $gateway.resources.limits.memory "path" "gateway.resources.limits.memory")) -}}
{{- if gt $request $limit -}}
{{- $texts = append $texts (printf "gateway.resources: requests.memory %s is more than limits.memory %s; lower the first or raise the second" (include "spillway.bytesText" $request) (include "spillway.bytesText" $limit)) -}}
{{- end -}}
{{- /* Beside the index, request bodies and unread replies 256 MiB for the interpreter, buffers of running requests and what loading
       leaves behind, and for each model 192 MiB: a tokenizer of 150,000 tokens (about 120) and its cache (64). */ -}}
{{- $index := int64 (include "spillway.bytes" (dict "value" $gateway.index.bytesMax "path" "gateway.index.bytesMax")) -}}
{{- $bodies := int64 (include "spillway.bytes" (dict "value" $gateway.limits.bodiesBytesMax "path" "gateway.limits.bodiesBytesMax")) -}}
{{- $replies := int64 (include "spillway.bytes" (dict "value" $gateway.limits.repliesBytesMax "path" "gateway.limits.repliesBytesMax")) -}}
{{- /* Each process of several has the latter two; one more of them has the index. */ -}}
{{- $processes := int64 $gateway.processes -}}
{{- if gt $processes 1 -}}{{- $processes = add $processes 1 -}}{{- end -}}
{{- $needed := add (mul $index (len .engines)) (mul $processes (add (mul 201326592 (len .engines)) 268435456)) $bodies $replies -}}
{{- if lt $limit $needed -}}
{{- if gt $processes 1 -}}
{{- $texts = append $texts (printf "gateway.resources.limits.memory: %s cannot hold gateway.index.bytesMax %s x %d models, limits.bodiesBytesMax %s, limits.repliesBytesMax %s, and 256 MiB and 192 MiB of tokenizer for each model in each of %d processes (gateway.processes: %d and one that routes); set it to %s or more, or lower those" (include "spillway.bytesText" $limit) (include "spillway.bytesText" $index) (len .engines) (include "spillway.bytesText" $bodies) (include "spillway.bytesText" $replies) $processes (int64 $gateway.processes) (include "spillway.quantity" $needed)) -}}
{{- else -}}
{{- $texts = append $texts (printf "gateway.resources.limits.memory: %s cannot hold gateway.index.bytesMax %s and 192 MiB of tokenizer x %d models, limits.bodiesBytesMax %s, limits.repliesBytesMax %s and 256 MiB for the process; set it to %s or more, or lower those" (include "spillway.bytesText" $limit) (include "spillway.bytesText" $index) (len .engines) (include "spillway.bytesText" $bodies) (include "spillway.bytesText" $replies) (include "spillway.quantity" $needed)) -}}
{{- end -}}
{{- end -}}
{{- /* What one request or stream may take beside those. */ -}}
{{- $room := max 67108864 (sub $limit $needed) -}}
{{- range $setting, $value := dict "limits.plainReplyBufferBytes" $gateway.limits.plainReplyBufferBytes "connections.headBytesMax" $gateway.connections.headBytesMax "continuation.bytesMax" (ternary $gateway.continuation.bytesMax 1 $gateway.continuation.enabled) -}}
{{- $bytes := int64 (include "spillway.bytes" (dict "value" $value "path" (printf "gateway.%s" $setting))) -}}
{{- if gt $bytes $room -}}
{{- $texts = append $texts (printf "gateway.%s: %v given, at most %s needed, which resources.limits.memory: %v leaves beside index, bodies, replies, tokenizers and processes; lower it, or raise the limit" $setting $value (include "spillway.bytesText" $room) $gateway.resources.limits.memory) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with include "spillway.engineEndSeconds" .engines -}}
{{- if ge (float64 (default 0 $gateway.health.endingSeconds)) (float64 .) -}}
{{- $texts = append $texts (printf "gateway.health.endingSeconds: %v is not before the engines' own limit, drainDelaySeconds and drainTimeoutSeconds of engine.lifecycle, %v s together; lower it, or leave it null" $gateway.health.endingSeconds (float64 .)) -}}
{{- end -}}
{{- end -}}
{{- if and $gateway.continuation.enabled (gt (float64 $gateway.continuation.stallSeconds) (float64 $gateway.timeouts.idleSeconds)) -}}
{{- $texts = append $texts (printf "gateway.continuation.stallSeconds: %v given, but a stream without an event ends after timeouts.idleSeconds: %v; lower the first, or raise the second" $gateway.continuation.stallSeconds $gateway.timeouts.idleSeconds) -}}
{{- end -}}
{{- /* Bodies above 1 MiB get three quarters of it. */ -}}
{{- $longest := int64 (include "spillway.bytes" (dict "value" $gateway.limits.bodyBytesMax "path" "gateway.limits.bodyBytesMax")) -}}
{{- $together := int64 (include "spillway.bytes" (dict "value" $gateway.limits.bodiesBytesMax "path" "gateway.limits.bodiesBytesMax")) -}}
{{- $least := div (add (mul $longest 4 (int64 $gateway.processes)) 2) 3 -}}
{{- if lt $together $least -}}
{{- $each := "" -}}
{{- if gt (int64 $gateway.processes) 1 -}}{{- $each = printf " in each of %d processes" (int64 $gateway.processes) -}}{{- end -}}
{{- $texts = append $texts (printf "gateway.limits.bodiesBytesMax: %v given, at least %s needed for one body of bodyBytesMax: %v%s, as long bodies get three quarters of it; raise it, or lower bodyBytesMax" $gateway.limits.bodiesBytesMax (include "spillway.quantity" $least) $gateway.limits.bodyBytesMax $each) -}}
{{- end -}}
{{- with $gateway.auth.sharedLimits -}}
{{- if and .url (lt (float64 .leaseSeconds) (mulf 10 .reportSeconds)) -}}
{{- $texts = append $texts (printf "gateway.auth.sharedLimits.leaseSeconds: %v given, at least ten times reportSeconds: %v needed; raise it" .leaseSeconds .reportSeconds) -}}
{{- end -}}
{{- end -}}
{{- range $item := .engines -}}
{{- $tokenizer := $item.engine.model.tokenizer -}}
{{- if hasPrefix "/" $tokenizer -}}
{{- $brought := false -}}
{{- range $gateway.extraVolumeMounts -}}{{- if hasPrefix (printf "%s/" (trimSuffix "/" .mountPath)) (printf "%s/" $tokenizer) -}}{{- $brought = true -}}{{- end -}}{{- end -}}
{{- if not (or $brought $gateway.image.tag $gateway.image.digest (ne $gateway.image.repository "spillway-gateway")) -}}
{{- $texts = append $texts (printf "%s.model.tokenizer: %s is a folder in the gateway's pod, but nothing brings it; mount it with gateway.extraVolumes and extraVolumeMounts, or write volume or none" $item.path $tokenizer) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $gateway.breaker -}}
{{- if lt (float64 .openSecondsMax) (float64 .openSeconds) -}}
{{- $texts = append $texts (printf "gateway.breaker.openSecondsMax: %v is less than openSeconds: %v, from which it grows; raise openSecondsMax or lower openSeconds" .openSecondsMax .openSeconds) -}}
{{- end -}}
{{- end -}}
{{- if $gateway.opsPort -}}
{{- if eq (int64 $gateway.opsPort) (int64 $gateway.port) -}}
{{- $texts = append $texts (printf "gateway.opsPort: %d is also port; give each its own" (int64 $gateway.opsPort)) -}}
{{- end -}}
{{- else if and $gateway.tls.secret.name $values.monitoring.serviceMonitor.enabled -}}
{{- $texts = append $texts "monitoring.serviceMonitor.enabled: true, but gateway.tls closes /metrics to plain HTTP; set gateway.opsPort, e.g. 8001: Prometheus needs no certificate there" -}}
{{- else if and $gateway.auth.keysSecret.name $values.monitoring.serviceMonitor.enabled -}}
{{- $texts = append $texts "monitoring.serviceMonitor.enabled: true, but with gateway.auth.keysSecret /metrics on the port of clients requires an operator's key; set gateway.opsPort, e.g. 8001: it needs no key there" -}}
{{- end -}}
{{- range $what := list "cpu" "ephemeralStorage" -}}
{{- $request := get $gateway.resources.requests $what -}}{{- $limit := get $gateway.resources.limits $what -}}
{{- if eq $what "cpu" -}}
{{- range $kind := list "requests" "limits" -}}
{{- with get (get $gateway.resources $kind) "cpu" -}}
{{- if lt (include "spillway.milliCores" . | float64) 20.0 -}}
{{- $texts = append $texts (printf "gateway.resources.%s.cpu: %v given, at least 20m needed; whole cores have no unit: write \"1\"" $kind .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $limit (gt (int64 $gateway.processes) 1) -}}
{{- if lt (include "spillway.milliCores" $limit | float64) (mulf 1000.0 (int64 $gateway.processes)) -}}
{{- $texts = append $texts (printf "gateway.processes: %d given, but resources.limits.cpu: %v lets fewer of them work at a time; raise the limit to \"%d\" or more, or set it to null, or lower processes" (int64 $gateway.processes) $limit (int64 $gateway.processes)) -}}
{{- end -}}
{{- end -}}
{{- else if and $request $limit -}}
{{- if gt (int64 (include "spillway.bytes" (dict "value" $request "path" "gateway.resources.requests.ephemeralStorage"))) (int64 (include "spillway.bytes" (dict "value" $limit "path" "gateway.resources.limits.ephemeralStorage"))) -}}
{{- $texts = append $texts (printf "gateway.resources: requests.ephemeralStorage %v is more than limits.ephemeralStorage %v; lower the first or raise the second" $request $limit) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $gateway.audit.file -}}
{{- $file := . -}}
{{- $brought := false -}}
{{- $sources := dict -}}{{- range $gateway.extraVolumes -}}{{- $_ := set $sources .name . -}}{{- end -}}
{{- range $gateway.extraVolumeMounts -}}
{{- if hasPrefix (printf "%s/" (trimSuffix "/" .mountPath)) $file -}}
{{- $brought = true -}}
{{- $source := default dict (get $sources .name) -}}
{{- if or .readOnly (hasKey $source "configMap") (hasKey $source "secret") (hasKey $source "projected") (hasKey $source "downwardAPI") -}}
{{- $texts = append $texts (printf "gateway.audit.file: %s lies in %s, where volume %s is read-only; mount one that can be written to" $file .mountPath .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if not $brought -}}
{{- $where := ternary "in /tmp, for whose 256 MiB kubelet evicts the pod once they are full" "in the image, which is read-only" (hasPrefix "/tmp/" $file) -}}
{{- $texts = append $texts (printf "gateway.audit.file: %s lies %s; mount its folder with extraVolumes and extraVolumeMounts, or set null for standard output" $file $where) -}}
{{- end -}}
{{- if not $gateway.audit.enabled -}}
{{- $texts = append $texts (printf "gateway.audit.file: %s, but audit.enabled is false; set it to true, or file: null" $file) -}}
{{- end -}}
{{- end -}}
{{- with $gateway.tracing.otlpEndpoint -}}
{{- if contains "@" . -}}
{{- $texts = append $texts "gateway.tracing.otlpEndpoint holds credentials, which would lie in a ConfigMap; give them as a header by OTEL_EXPORTER_OTLP_HEADERS in gateway.extraEnvVars with valueFrom.secretKeyRef" -}}
{{- else if not (regexMatch "^https?://(\\[[0-9A-Fa-f:.]+\\]|[A-Za-z0-9._-]+)(:([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]))?/[^ ]*$" .) -}}
{{- $texts = append $texts (printf "gateway.tracing.otlpEndpoint: %q is no address with its path; write http://collector:4318/v1/traces, or null for no traces" (include "spillway.shownUrl" .)) -}}
{{- end -}}
{{- end -}}
{{- $texts = concat $texts (include "spillway.authProblems" . | fromYamlArray) -}}
{{- $seen := dict -}}
{{- range $gateway.extraEnvVars -}}
{{- if has .name (list "SPILLWAY_LIMITS_USERNAME" "SPILLWAY_LIMITS_PASSWORD") -}}{{- $texts = append $texts (printf "gateway.extraEnvVars: %s is set by the chart; name the Secret in gateway.auth.sharedLimits.existingSecret" .name) -}}{{- end -}}
{{- if hasKey $seen .name -}}{{- $texts = append $texts (printf "gateway.extraEnvVars: %s is listed twice; remove one" .name) -}}{{- end -}}
{{- $_ := set $seen .name true -}}
{{- end -}}
{{- if and $values.networkPolicy.enabled $values.networkPolicy.restrictEgress (not $values.networkPolicy.gatewayEgress) -}}
{{- range $way := list (list "gateway.auth.sharedLimits.url" $gateway.auth.sharedLimits.url) (list "gateway.tracing.otlpEndpoint" $gateway.tracing.otlpEndpoint) -}}
{{- if index $way 1 -}}
{{- $texts = append $texts (printf "networkPolicy.restrictEgress: true closes the way to %s: %s; list its address in networkPolicy.gatewayEgress" (index $way 0) (include "spillway.shownUrl" (index $way 1))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $texts = concat $texts (include "spillway.volumeNameProblems" (dict "path" "gateway" "section" $gateway "own" (list "config" "scratch" "secrets")) | fromYamlArray) -}}
{{- range $texts -}}{{- include "spillway.problem" (dict "problems" $problems "text" .) -}}{{- end -}}
{{- end -}}

{{/* (root, engines) -> list of texts. */}}
{{- define "spillway.authProblems" -}}
{{- $values := .root.Values -}}{{- $auth := $values.gateway.auth -}}
{{- $texts := list -}}
{{- if and $auth.keysSecret.name (not $auth.saltSecret.name) -}}
{{- $texts = append $texts (printf "gateway.auth.saltSecret.name is empty; with keysSecret each tenant has a cache of its own, which begins with this secret: kubectl create secret generic gateway-salt --from-literal=%s=$(openssl rand -base64 48)" $auth.saltSecret.key) -}}
{{- end -}}
{{- if and $auth.saltSecret.name (not $auth.keysSecret.name) -}}
{{- $texts = append $texts (printf "gateway.auth.saltSecret.name: %s, but keysSecret.name is empty; name the Secret with the tenants and the hashes of their keys, or remove saltSecret" $auth.saltSecret.name) -}}
{{- end -}}
{{- if and $auth.engineKeySecret.name (not $auth.keysSecret.name) -}}
{{- $texts = append $texts (printf "gateway.auth.engineKeySecret.name: %s, but keysSecret.name is empty, so that %s; %s"
  $auth.engineKeySecret.name "the gateway would add the engines' key to the requests of clients that have none"
  "set keysSecret and saltSecret too, or remove engineKeySecret (clients then send the engines' key themselves)") -}}
{{- end -}}
{{- $entries := dict -}}
{{- range include "spillway.authFiles" $auth | fromYamlArray -}}
{{- $entry := printf "%s, entry %s," .name (first .items).key -}}
{{- with get $entries $entry -}}
{{- $texts = append $texts (printf "gateway.auth: %s is named by two of %s; give each a secret of its own"
  $entry "keysSecret, saltSecret and engineKeySecret") -}}
{{- end -}}
{{- $_ := set $entries $entry true -}}
{{- end -}}
{{- $demanded := dict -}}
{{- range $item := .engines -}}
{{- with $item.engine.apiKeySecret -}}
{{- if .name -}}{{- $_ := set $demanded (printf "%s/%s" .name .key) (printf "%s.apiKeySecret" $item.path) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- $first := keys $demanded | sortAlpha | first -}}
{{- if and $demanded $auth.keysSecret.name (not $auth.engineKeySecret.name) -}}
{{- $texts = append $texts (printf "gateway.auth.engineKeySecret.name is empty, but engines demand a key (%s), and clients' keys no longer reach them; set it to {name: %s, key: %s}" (get $demanded $first) (splitList "/" $first | first) (splitList "/" $first | last)) -}}
{{- end -}}
{{- if and $auth.engineKeySecret.name (gt (len $demanded) 1) -}}
{{- $texts = append $texts (printf "gateway.auth.engineKeySecret: the gateway sends one key to all engines, but %s name different ones; let all name one Secret and key" (values $demanded | sortAlpha | join " and ")) -}}
{{- end -}}
{{- if and (include "spillway.gatewaySecretFiles" $values.gateway | fromYamlArray) (ne (int64 (default 0 (default dict $values.gateway.podSecurityContext).runAsUser)) 0) (not (hasKey $values.gateway.podSecurityContext "fsGroup")) -}}
{{- $texts = append $texts (printf "gateway: user %d of its pods cannot read the files of their Secrets, which are root's alone; add fsGroup to gateway.podSecurityContext" (int64 $values.gateway.podSecurityContext.runAsUser)) -}}
{{- end -}}
{{- with $auth.sharedLimits -}}
{{- if contains "@" .url -}}
{{- $texts = append $texts "gateway.auth.sharedLimits.url holds credentials; put them into a Secret and name it in existingSecret" -}}
{{- else if and .url (not (regexMatch "^((rediss?://HOST(/[0-9]*)?)|(rediss?-cluster://HOST/?)|(unix:///[^?# ]+(\\?db=[0-9]+)?))$" (regexReplaceAll "//(\\[[0-9A-Fa-f:.]+\\]|[A-Za-z0-9._-]+)(:([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]))?(/|$)" .url "//HOST${4}"))) -}}
{{- $texts = append $texts (printf "gateway.auth.sharedLimits.url: %q is no address; write redis://host:6379/0, rediss://, redis-cluster://host:6379 (one server of the cluster, which names the others) or unix:///path?db=0, with a port from 1 to 65535" (include "spillway.shownUrl" .url)) -}}
{{- else if and (hasPrefix "unix:" .url) (not $values.gateway.extraVolumeMounts) -}}
{{- $texts = append $texts (printf "gateway.auth.sharedLimits.url: %s is a socket in the pod, but nothing brings it; mount its folder with gateway.extraVolumes and extraVolumeMounts" (include "spillway.shownUrl" .url)) -}}
{{- end -}}
{{- if and .url (not $auth.keysSecret.name) -}}
{{- $texts = append $texts (printf "gateway.auth.sharedLimits.url: %s, but there are no tenants to limit; set gateway.auth.keysSecret, or remove it" (include "spillway.shownUrl" .url)) -}}
{{- end -}}
{{- if and .caSecret.name (not (hasPrefix "rediss" .url)) -}}
{{- $texts = append $texts (printf "gateway.auth.sharedLimits.caSecret.name: %s, but url speaks no TLS; begin it with rediss, or remove caSecret" .caSecret.name) -}}
{{- end -}}
{{- if and (not .url) .existingSecret.name -}}
{{- $texts = append $texts (printf "gateway.auth.sharedLimits.existingSecret.name: %s, but url is empty; give the server's address, or remove existingSecret" .existingSecret.name) -}}
{{- end -}}
{{- if and .existingSecret.usernameKey (not .existingSecret.name) -}}
{{- $texts = append $texts (printf "gateway.auth.sharedLimits.existingSecret.usernameKey: %s, but existingSecret.name is empty; name the Secret, or remove usernameKey" .existingSecret.usernameKey) -}}
{{- end -}}
{{- $embedded := include "spillway.name" (dict "root" $.root "suffix" "redis") -}}
{{- if and $values.redis.enabled (regexMatch (printf "//%s[.:/]" (regexQuoteMeta $embedded)) (printf "%s/" .url)) -}}
{{- $texts = append $texts (printf "gateway.auth.sharedLimits.url: %s is the embedded server, whose only user may run no scripts, and limits are one; name a Redis or Valkey of your own" (include "spillway.shownUrl" .url)) -}}
{{- end -}}
{{- if and .url (lt (float64 .leaseSeconds) (mulf 10.0 (float64 .reportSeconds))) -}}
{{- $texts = append $texts (printf "gateway.auth.sharedLimits.leaseSeconds: %v is less than ten times reportSeconds: %v; raise leaseSeconds" .leaseSeconds .reportSeconds) -}}
{{- end -}}
{{- end -}}
{{- if and $values.tests.apiKeySecret.name (not $auth.keysSecret.name) -}}
{{- $texts = append $texts (printf "tests.apiKeySecret.name: %s, but the gateway requires no keys; set gateway.auth.keysSecret, or remove it" $values.tests.apiKeySecret.name) -}}
{{- end -}}
{{- toYaml $texts -}}
{{- end -}}

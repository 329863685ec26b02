{{/* The parts of a gateway pod that have cases in them, and the gateway's own configuration. */}}

{{/* root: the files of the gateway's ConfigMap. */}}
{{- define "spillway.gatewayFiles" -}}
{{- $settings := dict -}}
{{- include "spillway.gatewaySettings" (dict "root" . "out" $settings) -}}
gateway.yaml: |
  # Written by the chart; read by spillway_gateway.
  {{- toYaml $settings | nindent 2 }}
{{- end -}}

{{/* root -> hash of what a gateway reads at its start alone; no pod ends for what it reads again by itself. */}}
{{- define "spillway.gatewayChecksum" -}}
{{- $settings := dict -}}
{{- include "spillway.gatewaySettings" (dict "root" . "out" $settings) -}}
{{- if $settings.reload.periodSeconds -}}
{{- range .spillwayNames.liveSections -}}{{- $_ := unset $settings . -}}{{- end -}}
{{- range $settings.models -}}{{- $_ := unset (unset . "aliases") "adapterAliases" -}}{{- end -}}
{{- end -}}
{{- toYaml $settings | sha256sum -}}
{{- end -}}

{{/* (root, out): the YAML of `python -m spillway_gateway --config` into out. */}}
{{- define "spillway.gatewaySettings" -}}
{{- $out := .out -}}{{- $gateway := deepCopy .root.Values.gateway -}}
{{- include "spillway.wholeNumbers" $gateway -}}
{{- $models := list -}}{{- $named := dict -}}
{{- range .root.spillwayPlan -}}
{{- $model := dict "name" .servedName "aliases" (default list .engine.model.aliases) -}}
{{- include "spillway.gatewayModel" (dict "root" $.root "item" . "model" $model) -}}
{{- with get $named .servedName -}}
{{- include "spillway.joinedModel" (dict "model" . "more" $model) -}}
{{- else -}}{{- $_ := set $named .servedName $model -}}{{- $models = append $models $model -}}{{- end -}}
{{- end -}}
{{- $listen := dict "host" .root.Values.listenAddress "port" $gateway.port -}}
{{- with $gateway.opsPort -}}{{- $_ := set $listen "opsPort" . -}}{{- end -}}
{{- if $gateway.picker.enabled -}}{{- $_ := set $listen "pickerPort" $gateway.picker.port -}}{{- end -}}
{{- if $gateway.tls.secret.name -}}
{{- $folder := .root.spillwayNames.folders.secrets -}}
{{- $_ := set $listen "tls" (dict "certFile" (printf "%s/tls.crt" $folder) "keyFile" (printf "%s/tls.key" $folder)
  "reloadSeconds" $gateway.tls.reloadSeconds) -}}
{{- end -}}
{{- range $section := list "connections" "timeouts" "health" "limits" "routing" "retention" "breaker" "continuation"
  "disaggregation" "admission" "cors" "index" "log" "audit" "tracing" "reload" -}}
{{- $settings := dict -}}
{{- include "spillway.passed" (dict "section" (get $gateway $section) "out" $settings) -}}
{{- $_ := set $out $section $settings -}}{{- end -}}
{{- $end := include "spillway.engineEndSeconds" .root.spillwayPlan -}}
{{- if and $end (kindIs "invalid" $gateway.health.endingSeconds) -}}
{{- $_ := set $out.health "endingSeconds" (round (mulf 0.95 (float64 $end)) 1) -}}{{- end -}}
{{- if gt (int64 $gateway.processes) 1 -}}{{- $_ := set $out "processes" (int64 $gateway.processes) -}}{{- end -}}
{{- include "spillway.overlay" (dict "base" $out "over" (dict "listen" $listen "models" $models
  "auth" (include "spillway.gatewayAuth" (merge (dict "names" .root.spillwayNames) $gateway.auth) | fromYaml)
  "shutdown" (pick $gateway.lifecycle "drainDelaySeconds" "drainTimeoutSeconds"))) -}}
{{- end -}}

{{/* (model, more): the engines of a further group of the same model into model. */}}
{{- define "spillway.joinedModel" -}}
{{- $model := .model -}}
{{- with .more.engines -}}{{- $_ := set $model "engines" (concat (default list $model.engines) .) -}}{{- end -}}
{{- with (default dict .more.discovery).kubernetes -}}
{{- $found := $model.discovery.kubernetes -}}
{{- $roles := set (default dict $found.roleServices) .service (default "both" .role) -}}
{{- $_ := set $found "roleServices" $roles -}}{{- end -}}{{- end -}}

{{/* (root, item, model): what the gateway has to know of a group into model. */}}
{{- define "spillway.gatewayModel" -}}
{{- $item := .item -}}{{- $engine := $item.engine -}}{{- $model := .model -}}
{{- with $engine.lora.adapters -}}
{{- $names := list -}}{{- range . -}}{{- $names = append $names .name -}}{{- end -}}
{{- $_ := set $model "adapters" $names -}}{{- end -}}
{{- with $engine.lora.aliases -}}
{{- $aliases := dict -}}{{- range . -}}{{- $_ := set $aliases .name .adapter -}}{{- end -}}
{{- $_ := set $model "adapterAliases" $aliases -}}{{- end -}}
{{- if $engine.lora.resolverFolder -}}{{- $_ := set $model "loadableAdapters" $engine.lora.resolverNames -}}{{- end -}}
{{- if include "spillway.sleeps" $item -}}
{{- $_ := set $model "wakeSeconds" (include "spillway.wakeSeconds" $item | float64) -}}{{- end -}}
{{- include "spillway.discovery" . -}}
{{- $tokenizer := $engine.model.tokenizer -}}
{{- if eq $tokenizer "volume" -}}
{{- $below := trimPrefix (trimSuffix "/" $engine.model.volume.mountPath) $engine.model.path -}}
{{- $tokenizer = print (include "spillway.tokenizerRoot" $item) $below -}}
{{- end -}}
{{- if ne $tokenizer "none" -}}{{- $_ := set $model "tokenizer" $tokenizer -}}{{- end -}}
{{- end -}}

{{/* item -> is the group scaled down to no engine, to be woken by a request? */}}
{{- define "spillway.sleeps" -}}
{{- with .engine.autoscaling -}}{{- if and .enabled (eq (int64 .minReplicas) 0) -}}true{{- end -}}{{- end -}}
{{- end -}}

{{/* item -> seconds that a request waits for the first engine of such a group. */}}
{{- define "spillway.wakeSeconds" -}}
{{- default .engine.lifecycle.startupTimeoutSeconds .engine.autoscaling.wakeTimeoutSeconds -}}
{{- end -}}

{{/* (root, item, index) -> the name of an engine's pod in the cluster's DNS. A LeaderWorkerSet has a Service of its own
that names its pods. */}}
{{- define "spillway.engineHost" -}}
{{- $named := dict "headless" (eq .item.controller "LeaderWorkerSet" | ternary .item.name .item.headless) -}}
{{ .item.name }}-{{ .index }}.{{ include "spillway.headlessHost" (dict "root" .root "item" $named) }}
{{- end -}}

{{/* (root, item) -> the name of the group's Service in the cluster's DNS. */}}
{{- define "spillway.headlessHost" -}}
{{ .item.headless }}.{{ include "spillway.namespace" .root }}.svc.{{ .root.Values.clusterDomain }}
{{- end -}}

{{/* (root, item, model): where the gateway finds this group, into model. */}}
{{- define "spillway.discovery" -}}
{{- $root := .root -}}{{- $item := .item -}}
{{- $events := $item.engine.kvEvents -}}{{- $ranks := int64 $item.engine.dataParallelSize -}}
{{- $found := dict -}}{{- $type := $root.Values.gateway.discovery.type -}}
{{- if gt $ranks 1 -}}{{- $_ := set $found "dataParallelRanks" $ranks -}}{{- end -}}
{{- $nodes := gt $ranks 1 | ternary (int64 $item.engine.nodesPerReplica) 1 -}}
{{- if ne $item.engine.role "both" -}}{{- $_ := set $found "role" $item.engine.role -}}{{- end -}}
{{- /* A list without an entry is none: a model without pods is asked for by its name, until there is one. */ -}}
{{- if or (ne $type "static") (eq (int64 $item.pods) 0) -}}
{{- $isWatched := eq $type "kubernetes" -}}
{{- $ports := ternary (dict "kvEventsPort" "kv-events" "kvReplayPort" "kv-replay")
  (dict "kvEventsPort" $events.port "kvReplayPort" $events.replayPort) $isWatched -}}
{{- $namespace := include "spillway.namespace" $root -}}
{{- $service := ternary (dict "service" $item.headless "namespace" $namespace "port" "http")
  (dict "name" (include "spillway.headlessHost" .) "port" $item.engine.port) $isWatched -}}
{{- if and $isWatched (eq $item.controller "Deployment") -}}
{{- $_ := set $found "podDeletionCostSeconds" $root.Values.gateway.discovery.podDeletionCostSeconds -}}
{{- end -}}
{{- if gt (int $nodes) 1 -}}{{- $_ := set $found "nodesPerReplica" $nodes -}}{{- end -}}
{{- include "spillway.overlay" (dict "base" $found "over" (merge $service (ternary $ports dict $events.enabled))) -}}
{{- $_ := set .model "discovery" (dict (ternary "kubernetes" "dns" $isWatched) $found) -}}
{{- else -}}
{{- $engines := list -}}
{{- range $index := until (int $item.pods) -}}
{{- $host := include "spillway.engineHost" (dict "root" $root "item" $item "index" $index) -}}
{{- $engine := merge (dict "name" (printf "%s-%d" $item.name $index)
  "url" (printf "http://%s:%d" $host (int64 $item.engine.port))) $found -}}
{{- if $events.enabled -}}
{{- $_ := set $engine "kvEvents" (printf "tcp://%s:%d" $host (int64 $events.port)) -}}
{{- $_ = set $engine "kvReplay" (printf "tcp://%s:%d" $host (int64 $events.replayPort)) -}}
{{- end -}}
{{- range $worker := untilStep 1 (int $nodes) 1 -}}
{{- $at := include "spillway.engineHost" (dict "root" $root "item" $item "index" (printf "%d-%d" $index $worker)) -}}
{{- $_ := set $engine "workers" (append (default list $engine.workers) $at) -}}
{{- end -}}
{{- $engines = append $engines $engine -}}
{{- end -}}
{{- $_ := set .model "engines" $engines -}}{{- end -}}{{- end -}}

{{/* gateway.auth and names -> the gateway's own `auth`: paths of files in place of Secrets. */}}
{{- define "spillway.gatewayAuth" -}}
reloadSeconds: {{ .reloadSeconds }}
unsaltedRoutes: {{ .unsaltedRoutes }}
{{- with .kvTransferTenants }}
kvTransferTenants: {{ toJson . }}{{ end }}
{{- range include "spillway.authFiles" . | fromYamlArray }}
{{ .setting }}: {{ $.names.folders.secrets }}/{{ (first .items).path }}{{ end }}
{{- with .sharedLimits }}
{{- if .url }}
sharedLimits:
  {{- toYaml (omit . "existingSecret" "caSecret") | nindent 2 }}
  {{- if .caSecret.name }}
  tlsCaFile: {{ $.names.folders.secrets }}/limits-ca.crt{{ end }}
  {{- if .existingSecret.name }}
  {{- if .existingSecret.usernameKey }}
  usernameEnv: {{ $.names.variables.limitsUsername }}{{ end }}
  passwordEnv: {{ $.names.variables.limitsPassword }}
  {{- end }}{{- end }}{{- end }}{{- end -}}

{{/* gateway.auth.sharedLimits and names -> list of EnvVars with its login. */}}
{{- define "spillway.limitsLogin" -}}
{{- $secret := .existingSecret -}}{{- $name := empty .url | ternary "" $secret.name -}}
{{- include "spillway.secretVariable" (dict "name" .names.variables.limitsUsername
  "secret" (empty $secret.usernameKey | ternary "" $name) "key" $secret.usernameKey) }}
{{ include "spillway.secretVariable" (dict "name" .names.variables.limitsPassword "secret" $name
  "key" $secret.passwordKey) -}}
{{- end -}}

{{/* gateway -> list of {name, items}: Secrets that become files in the gateway's pod. */}}
{{- define "spillway.gatewaySecretFiles" -}}
{{- $files := include "spillway.authFiles" .auth | fromYamlArray -}}
{{- with .tls.secret -}}
{{- if .name -}}
{{- $files = append $files (dict "name" .name "items" (list (dict "key" .certificateKey "path" "tls.crt")
  (dict "key" .privateKeyKey "path" "tls.key"))) -}}
{{- end -}}{{- end -}}
{{- with .auth.sharedLimits -}}
{{- if and .url .caSecret.name -}}
{{- $entry := dict "key" .caSecret.key "path" "limits-ca.crt" -}}
{{- $files = append $files (dict "name" .caSecret.name "items" (list $entry)) -}}
{{- end -}}{{- end -}}
{{- toYaml $files -}}
{{- end -}}

{{/* gateway.auth -> list of {setting, name, items}: the Secret behind each of the gateway's own settings. */}}
{{- define "spillway.authFiles" -}}
{{- $files := list -}}
{{- $known := list (list "keysSecret" "keysFile" "gateway-keys.yaml")
  (list "saltSecret" "saltSecretFile" "gateway-salt") (list "engineKeySecret" "engineKeyFile" "engine-key") -}}
{{- range $entry := $known -}}
{{- $secret := get $ (index $entry 0) -}}
{{- if $secret.name -}}
{{- $files = append $files (dict "setting" (index $entry 1) "name" $secret.name
  "items" (list (dict "key" $secret.key "path" (index $entry 2)))) -}}
{{- end -}}{{- end -}}
{{- toYaml $files -}}
{{- end -}}

{{/* seconds from the decision to end a pod to SIGKILL; 10: the last error events and the process's own end. */}}
{{- define "spillway.gatewayGraceSeconds" -}}
{{- with .Values.gateway.lifecycle -}}
{{ ceil (addf .preStopSeconds .drainDelaySeconds .drainTimeoutSeconds 10) | int64 }}
{{- end -}}{{- end -}}

{{/* root -> seconds after which a rollout counts as stuck. 300: pulling images and scheduling. */}}
{{- define "spillway.gatewayProgressSeconds" -}}
{{- $slowest := 0 -}}
{{- range .spillwayPlan -}}{{- $slowest = max $slowest (int64 .engine.lifecycle.startupTimeoutSeconds) -}}{{- end -}}
{{ add $slowest (int64 .Values.gateway.lifecycle.startupTimeoutSeconds) 300 }}
{{- end -}}

{{/* gateway.ingress -> list of {host, path}: `host` and `path`, unless only `hosts` are given, and these. */}}
{{- define "spillway.ingressRules" -}}
{{- $rules := list -}}
{{- if or .host (not .hosts) -}}{{- $rules = append $rules (dict "host" .host "path" .path) -}}{{- end -}}
{{- range .hosts -}}{{- $rules = append $rules (dict "host" .host "path" (default "/" .path)) -}}{{- end -}}
{{- toYaml $rules -}}
{{- end -}}

{{/* root -> seconds for which a request that the gateway still works on may send no byte, and ten to spare. */}}
{{- define "spillway.silentSeconds" -}}
{{- $times := .Values.gateway.timeouts -}}
{{- $most := max (int64 $times.plainSeconds) (int64 $times.firstByteSeconds) (int64 $times.idleSeconds) -}}
{{- range .spillwayPlan -}}
{{- if include "spillway.sleeps" . -}}{{- $most = max $most (include "spillway.wakeSeconds" . | int64) -}}{{- end -}}
{{- end -}}
{{- add $most 10 -}}
{{- end -}}

{{/* root -> annotations that hold ingress-nginx to the gateway's own bounds, in place of its 60 seconds and 1 MiB. */}}
{{- define "spillway.ingressBounds" -}}
{{- $bytes := include "spillway.bytes" (dict "value" .Values.gateway.limits.bodyBytesMax
  "path" "gateway.limits.bodyBytesMax") -}}
{{- $seconds := include "spillway.silentSeconds" . -}}
nginx.ingress.kubernetes.io/proxy-body-size: {{ printf "%dm" (div (add (int64 $bytes) 1048575) 1048576) }}
nginx.ingress.kubernetes.io/proxy-read-timeout: {{ $seconds | quote }}
nginx.ingress.kubernetes.io/proxy-send-timeout: {{ $seconds | quote }}
{{- end -}}

{{/* item -> where a model's volume lies in the gateway: several models may share a mountPath. */}}
{{- define "spillway.tokenizerRoot" -}}
{{ .names.folders.models }}/{{ .model }}
{{- end -}}

{{/* root -> list of {name, mountPath, volume}: models whose tokenizer the gateway reads from the model's volume. */}}
{{- define "spillway.tokenizerVolumes" -}}
{{- $found := list -}}
{{- range $item := .spillwayPlan -}}
{{- if eq $item.engine.model.tokenizer "volume" -}}
{{- $name := include "spillway.fit" (dict "text" (printf "model-%s" $item.model) "max" 63) -}}
{{- $found = append $found (dict "name" $name "mountPath" (include "spillway.tokenizerRoot" $item)
  "volume" (merge (dict "readOnly" true) $item.engine.model.volume)) -}}
{{- end -}}{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{/*
What will be rendered, decided in one place before any object is: every group of engines with its defaults laid out,
its accelerator, its memory arithmetic and the YAML that its pods will read, and what is wrong with the values.

(root, plan): fails with everything that is wrong, else fills plan, which all templates of a render share and none may
change, with
  engines   list of dicts: key, path, name, headless, engine, accelerator, platform, memory, shape, servedName, pods,
            settings (the engine service's own configuration), secretFiles (what of which Secret becomes which file)
  problems  dict of texts, in order
Every template begins with spillway.requireValid: which one Helm renders first is by chance.
*/}}
{{- define "spillway.plan" -}}
{{- /* The root is one map for all templates of a render: the first makes the plan, the others read it. */ -}}
{{- if not (hasKey .root "spillwayPlan") -}}
{{- $made := dict -}}
{{- include "spillway.makePlan" (dict "root" .root "plan" $made) -}}
{{- include "spillway.requireNoProblem" $made -}}
{{- $_ := set .root "spillwayPlan" $made -}}
{{- end -}}
{{- $plan := .plan -}}
{{- range $key, $value := .root.spillwayPlan -}}{{- $_ := set $plan $key $value -}}{{- end -}}
{{- end -}}

{{/* (root, plan): what spillway.plan promises, computed. Where keys, types or sizes are wrong, problems are all there is:
nothing can be concluded from such values. */}}
{{- define "spillway.makePlan" -}}
{{- $root := .root -}}{{- $plan := .plan -}}
{{- $problems := dict -}}
{{- $_ := set $plan "problems" $problems -}}
{{- $_ = set $plan "engines" list -}}
{{- include "spillway.givenChecks" (dict "root" $root "problems" $problems) -}}
{{- if not $problems -}}
{{- $presets := $root.Files.Get "files/accelerators.yaml" | fromYaml -}}
{{- $engines := list -}}
{{- $groups := dict -}}
{{- range $key, $over := $root.Values.engines -}}
{{- $engine := deepCopy $root.Values.engine -}}
{{- $overOffload := default dict (default dict $over).offload -}}
{{- /* An entry that names one of the two ways to size the CPU tier replaces the other. */ -}}
{{- if and (hasKey $overOffload "cpuBytes") (not (hasKey $overOffload "numCpuBlocks")) -}}{{- $_ := unset $engine.offload "numCpuBlocks" -}}{{- end -}}
{{- if and (hasKey $overOffload "numCpuBlocks") (not (hasKey $overOffload "cpuBytes")) -}}{{- $_ := unset $engine.offload "cpuBytes" -}}{{- end -}}
{{- include "spillway.overlay" (dict "base" $engine "over" (deepCopy (default dict $over))) -}}
{{- $_ := set $groups $key $engine -}}
{{- end -}}
{{- if not $groups -}}
{{- $_ := set $groups "" (deepCopy $root.Values.engine) -}}
{{- end -}}
{{- include "spillway.sizeChecks" (dict "root" $root "groups" $groups "problems" $problems) -}}
{{- if not $problems -}}
{{- range $key := keys $groups | sortAlpha -}}
{{- $engine := get $groups $key -}}
{{- $path := ternary (printf "engines.%s" $key) "engine" (ne $key "") -}}
{{- include "spillway.wholeNumbers" $engine -}}
{{- $name := include "spillway.name" (dict "root" $root "suffix" (has $key (list "" "default") | ternary "engine" (printf "engine-%s" $key))) -}}
{{- $accelerator := deepCopy (get $presets $engine.accelerator.preset) -}}
{{- include "spillway.accelerator" (dict "engine" $engine "accelerator" $accelerator) -}}
{{- $shape := dict -}}
{{- include "spillway.shape" (dict "engine" $engine "path" $path "root" $root "problems" $problems "out" $shape) -}}
{{- $memory := dict -}}
{{- include "spillway.memory" (dict "engine" $engine "path" $path "platform" $accelerator.platform "shape" $shape "problems" $problems "out" $memory) -}}
{{- $servedName := default (base $engine.model.path) $engine.model.servedName -}}
{{- $pods := int64 $engine.replicas -}}
{{- if $engine.autoscaling.enabled -}}{{- $pods = int64 $engine.autoscaling.maxReplicas -}}{{- end -}}
{{- $item := dict "key" $key "path" $path "name" $name "headless" (include "spillway.fit" (dict "text" (printf "%s-pods" $name) "max" 63)) "model" (default "default" $key) "engine" $engine "accelerator" $accelerator "platform" $accelerator.platform "memory" $memory "shape" $shape "servedName" $servedName "pods" $pods -}}
{{- include "spillway.engineSettings" (dict "root" $root "item" $item "problems" $problems) -}}
{{- include "spillway.engineChecks" (dict "root" $root "item" $item "problems" $problems) -}}
{{- include "spillway.platformChecks" (dict "item" $item "problems" $problems) -}}
{{- include "spillway.loraChecks" (dict "item" $item "problems" $problems) -}}
{{- include "spillway.kvTransferChecks" (dict "root" $root "item" $item "problems" $problems) -}}
{{- include "spillway.factChecks" (dict "item" $item "problems" $problems) -}}
{{- include "spillway.tierChecks" (dict "root" $root "item" $item "problems" $problems) -}}
{{- $engines = append $engines $item -}}
{{- end -}}
{{- include "spillway.releaseChecks" (dict "root" $root "engines" $engines "problems" $problems) -}}
{{- include "spillway.gatewayChecks" (dict "root" $root "engines" $engines "problems" $problems) -}}
{{- include "spillway.unreadChecks" (dict "root" $root "groups" $groups "problems" $problems) -}}
{{- include "spillway.credentialChecks" (dict "root" $root "engines" $engines "problems" $problems) -}}
{{- include "spillway.podChecks" (dict "root" $root "engines" $engines "problems" $problems) -}}
{{- include "spillway.containerChecks" (dict "root" $root "engines" $engines "problems" $problems) -}}
{{- include "spillway.schedulingChecks" (dict "root" $root "engines" $engines "problems" $problems) -}}
{{- include "spillway.routeChecks" (dict "root" $root "problems" $problems) -}}
{{- include "spillway.ascendChecks" (dict "root" $root "engines" $engines "problems" $problems) -}}
{{- include "spillway.kubernetesChecks" (dict "root" $root "engines" $engines "problems" $problems) -}}
{{- $_ := set $plan "engines" $engines -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* root: fails unless all values are right. */}}
{{- define "spillway.requireValid" -}}
{{- include "spillway.plan" (dict "root" . "plan" dict) -}}
{{- end -}}

{{/* Fails with everything that is wrong. (problems) */}}
{{- define "spillway.requireNoProblem" -}}
{{- with .problems -}}
{{- $texts := list -}}
{{- $all := . -}}
{{- range keys . | sortAlpha -}}{{- $texts = append $texts (get $all .) -}}{{- end -}}
{{- fail (printf "\n\nThese values cannot work:\n- %s\n" (join "\n- " $texts)) -}}
{{- end -}}
{{- end -}}

{{/* (engine, accelerator): lays what the values say over the preset. */}}
{{- define "spillway.accelerator" -}}
{{- $given := .engine.accelerator -}}
{{- $chosen := .accelerator -}}
{{- if $given.resourceName -}}{{- $_ := set $chosen "resourceName" $given.resourceName -}}{{- end -}}
{{- if not (kindIs "invalid" $given.count) -}}{{- $_ := set $chosen "count" (int64 $given.count) -}}
{{- else -}}{{- $_ := set $chosen "count" (include "spillway.ranks" .engine | int64) -}}
{{- end -}}
{{- if $given.visibleDevices.mode -}}{{- $_ := set $chosen "visibleDevices" $given.visibleDevices.mode -}}{{- end -}}
{{- $_ := set $chosen "env" (merge (include "spillway.hcclEnvironment" $given.hccl | fromYaml) $chosen.env) -}}
{{- if not (kindIs "invalid" .engine.schedulerName) -}}{{- $_ := set $chosen "schedulerName" .engine.schedulerName -}}{{- end -}}
{{- if $given.lockMemory -}}
{{- $capabilities := default dict $chosen.securityContext.capabilities -}}
{{- $_ := set $chosen.securityContext "capabilities" (dict "drop" (default list $capabilities.drop) "add" (append (default list $capabilities.add) "IPC_LOCK")) -}}
{{- end -}}
{{- if $given.privileged -}}
{{- $_ := set $chosen "securityContext" (dict "runAsUser" 0 "privileged" true) -}}
{{- end -}}
{{- if .engine.podSecurityContext -}}{{- $_ := set $chosen "podSecurityContext" .engine.podSecurityContext -}}{{- end -}}
{{- if .engine.securityContext -}}{{- $_ := set $chosen "securityContext" .engine.securityContext -}}{{- end -}}
{{- end -}}

{{/* (root, item, problems): sets item.settings, the YAML of `python -m spillway_engine --config`. */}}
{{- define "spillway.engineSettings" -}}
{{- $engine := .item.engine -}}
{{- $problems := .problems -}}
{{- $offload := $engine.offload -}}
{{- $settings := dict
  "model" (dict "path" $engine.model.path "servedName" .item.servedName "dtype" $engine.model.dtype "kvCacheDtype" $engine.model.kvCacheDtype "maxLength" $engine.model.maxLength "seed" $engine.model.seed)
  "host" .root.Values.listenAddress
  "port" $engine.port
  "blockSize" $engine.blockSize
  "tensorParallelSize" $engine.tensorParallelSize
  "pipelineParallelSize" $engine.pipelineParallelSize
  "dataParallelSize" $engine.dataParallelSize
  "platform" .item.platform
  "kvEvents" (dict "enabled" $engine.kvEvents.enabled "port" $engine.kvEvents.port "replayPort" $engine.kvEvents.replayPort)
  "extraArgs" $engine.extraArgs
  "extraEnv" (default dict $engine.extraEnv)
-}}
{{- with $engine.model.quantization -}}{{- $_ := set $settings.model "quantization" . -}}{{- end -}}
{{- with $engine.allowedMediaDomains -}}{{- $_ := set $settings "allowedMediaDomains" . -}}{{- end -}}
{{- if or $engine.lora.adapters $engine.lora.runtimeUpdating -}}
{{- $lora := dict "maxRank" $engine.lora.maxRank "maxActive" $engine.lora.maxActive -}}
{{- with $engine.lora.adapters -}}{{- $_ := set $lora "adapters" . -}}{{- end -}}
{{- if $engine.lora.runtimeUpdating -}}{{- $_ := set $lora "runtimeUpdating" true -}}{{- end -}}
{{- with $engine.lora.resolverFolder -}}{{- $_ := set $lora "resolverFolder" . -}}{{- end -}}
{{- with $engine.lora.maxInMemory -}}{{- $_ := set $lora "maxInMemory" . -}}{{- end -}}
{{- $_ := set $settings "lora" $lora -}}
{{- end -}}
{{- if eq $engine.accelerator.versionCheck "warn" -}}{{- $_ := set $settings "versionCheck" "warn" -}}{{- end -}}
{{- with include "spillway.cpuBinding" .item -}}{{- $_ := set $settings "cpuBinding" . -}}{{- end -}}
{{- with .item.memory.deviceBlocks -}}{{- $_ := set $settings "deviceBlocks" . -}}{{- end -}}
{{- $rendered := dict "enabled" $offload.enabled -}}
{{- if $offload.enabled -}}
{{- $_ := set $rendered "blocksPerChunk" $offload.blocksPerChunk -}}
{{- $_ = set $rendered "generatedTokens" (include "spillway.onOff" $offload.generatedTokens) -}}
{{- $_ = set $rendered "layerwiseLoads" (include "spillway.onOff" $offload.layerwiseLoads) -}}
{{- $_ = set $rendered "computeWhileLoading" (include "spillway.onOff" $offload.computeWhileLoading) -}}
{{- $_ = set $rendered "storing" $offload.storing -}}
{{- $_ = set $rendered "evictionPolicy" $offload.evictionPolicy -}}
{{- $_ = set $rendered "batchMemcpy" (include "spillway.onOff" $offload.batchMemcpy) -}}
{{- if $offload.numCpuBlocks -}}{{- $_ = set $rendered "numCpuBlocks" $offload.numCpuBlocks -}}
{{- else -}}{{- $_ = set $rendered "cpuBytes" (int64 (include "spillway.bytes" (dict "value" (default 0 $offload.cpuBytes) "path" (printf "%s.offload.cpuBytes" .item.path)))) -}}
{{- end -}}
{{- range $key := list "queueOrder" "queueOvertakeSeconds" "maxCopyDescriptors" "transport" "requestWaitSeconds" "promotionInFlightFraction" "promotionPerRequestFraction" "promotionAheadFraction" -}}{{- $_ = set $rendered $key (get $offload $key) -}}{{- end -}}
{{- range $key := list "prefillTokensPerSecond" "aclLibraryPath" "weightsVersion" -}}{{- with get $offload $key -}}{{- $_ := set $rendered $key . -}}{{- end -}}{{- end -}}
{{- with $offload.copyTable -}}
{{- $table := dict -}}
{{- range $direction, $rows := . -}}
{{- $whole := list -}}
{{- range $rows -}}
{{- $bytes := include "spillway.bytes" (dict "value" (first .) "path" (printf "%s.offload.copyTable.%s" $.item.path
  $direction)) -}}
{{- $whole = append $whole (list (int64 $bytes) (last .)) -}}
{{- end -}}
{{- $_ := set $table $direction $whole -}}
{{- end -}}
{{- $_ := set $rendered "copyTable" $table -}}
{{- end -}}
{{- $shared := dict -}}
{{- include "spillway.tierSettings" (dict "root" .root "item" .item "problems" $problems "out" $shared) -}}
{{- $_ = set $rendered "sharedTier" $shared -}}
{{- with $offload.extraTiers -}}{{- $_ := set $rendered "extraTiers" . -}}{{- end -}}
{{- end -}}
{{- $_ := set $settings "offload" $rendered -}}
{{- with $engine.kvTransfer -}}
{{- if .connector -}}
{{- $transfer := dict "connector" .connector "role" .role -}}
{{- with .modulePath -}}{{- $_ := set $transfer "modulePath" . -}}{{- end -}}
{{- with .extraConfig -}}{{- $_ := set $transfer "extraConfig" . -}}{{- end -}}
{{- $_ := set $settings "kvTransfer" $transfer -}}
{{- end -}}
{{- end -}}
{{- $lifecycle := $engine.lifecycle -}}
{{- $_ = set $settings "lifecycle" (dict "drainDelaySeconds" $lifecycle.drainDelaySeconds "drainTimeoutSeconds" $lifecycle.drainTimeoutSeconds "stopTimeoutSeconds" $lifecycle.stopTimeoutSeconds "selfCheck" (ternary "auto" (include "spillway.onOff" $lifecycle.selfCheck) (eq (toString $lifecycle.selfCheck) "true")) "selfCheckText" $lifecycle.selfCheckText "selfCheckTimeoutSeconds" $lifecycle.selfCheckTimeoutSeconds) -}}
{{- $names := dict -}}
{{- include "spillway.settingNames" (dict "root" .root "item" .item "out" $names) -}}
{{- $_ = set $settings "door" $names -}}
{{- $_ = set .item "settings" $settings -}}
{{- end -}}

{{/* item -> the group's addresses: http://POD.HEADLESS.NAMESPACE.svc.DOMAIN. (root, item, index) -> host */}}
{{- define "spillway.engineHost" -}}
{{ .item.name }}-{{ .index }}.{{ .item.headless }}.{{ include "spillway.namespace" .root }}.svc.{{ .root.Values.clusterDomain }}
{{- end -}}

{{/* (root, item, model): where the gateway finds this group, into model. */}}
{{- define "spillway.discovery" -}}
{{- $root := .root -}}{{- $item := .item -}}
{{- $events := $item.engine.kvEvents -}}{{- $ranks := int64 $item.engine.dataParallelSize -}}
{{- if eq $root.Values.gateway.discovery.type "kubernetes" -}}
{{- $service := dict "service" $item.headless "namespace" (include "spillway.namespace" $root) "port" "http" -}}
{{- if $events.enabled -}}
{{- $_ := set $service "kvEventsPort" "kv-events" -}}
{{- $_ = set $service "kvReplayPort" "kv-replay" -}}
{{- end -}}
{{- if gt $ranks 1 -}}{{- $_ := set $service "dataParallelRanks" $ranks -}}{{- end -}}
{{- $_ := set .model "discovery" (dict "kubernetes" $service) -}}
{{- /* A list without an entry is none: a model without pods is asked for by its name, until there is one. */ -}}
{{- else if or (eq $root.Values.gateway.discovery.type "dns") (eq (int64 $item.pods) 0) -}}
{{- $name := dict "name" (printf "%s.%s.svc.%s" $item.headless (include "spillway.namespace" $root) $root.Values.clusterDomain) "port" $item.engine.port -}}
{{- if $events.enabled -}}
{{- $_ := set $name "kvEventsPort" $events.port -}}
{{- $_ = set $name "kvReplayPort" $events.replayPort -}}
{{- end -}}
{{- if gt $ranks 1 -}}{{- $_ := set $name "dataParallelRanks" $ranks -}}{{- end -}}
{{- $_ := set .model "discovery" (dict "dns" $name) -}}
{{- else -}}
{{- $engines := list -}}
{{- range $index := until (int $item.pods) -}}
{{- $host := include "spillway.engineHost" (dict "root" $root "item" $item "index" $index) -}}
{{- $engine := dict "name" (printf "%s-%d" $item.name $index) "url" (printf "http://%s:%d" $host (int64 $item.engine.port)) -}}
{{- if $events.enabled -}}
{{- $_ := set $engine "kvEvents" (printf "tcp://%s:%d" $host (int64 $events.port)) -}}
{{- $_ = set $engine "kvReplay" (printf "tcp://%s:%d" $host (int64 $events.replayPort)) -}}
{{- end -}}
{{- if gt $ranks 1 -}}{{- $_ := set $engine "dataParallelRanks" $ranks -}}{{- end -}}
{{- $engines = append $engines $engine -}}
{{- end -}}
{{- $_ := set .model "engines" $engines -}}
{{- end -}}
{{- end -}}

{{/* (root, engines, problems, out): the YAML of `python -m spillway_gateway --config` into out. */}}
{{- define "spillway.gatewaySettings" -}}
{{- $root := .root -}}
{{- $gateway := deepCopy $root.Values.gateway -}}
{{- include "spillway.wholeNumbers" $gateway -}}
{{- $problems := .problems -}}
{{- $models := list -}}
{{- range $item := .engines -}}
{{- $model := dict "name" $item.servedName "aliases" (default list $item.engine.model.aliases) -}}
{{- with $item.engine.lora.adapters -}}
{{- $names := list -}}{{- range . -}}{{- $names = append $names .name -}}{{- end -}}
{{- $_ := set $model "adapters" $names -}}
{{- end -}}
{{- with $item.engine.lora.aliases -}}
{{- $aliases := dict -}}{{- range . -}}{{- $_ := set $aliases .name .adapter -}}{{- end -}}
{{- $_ := set $model "adapterAliases" $aliases -}}
{{- end -}}
{{- if $item.engine.lora.resolverFolder -}}{{- $_ := set $model "loadableAdapters" $item.engine.lora.resolverNames -}}{{- end -}}
{{- with $item.engine.autoscaling -}}
{{- if and .enabled (eq (int64 .minReplicas) 0) -}}{{- $_ := set $model "wakeSeconds" (default $item.engine.lifecycle.startupTimeoutSeconds .wakeTimeoutSeconds) -}}{{- end -}}
{{- end -}}
{{- include "spillway.discovery" (dict "root" $root "item" $item "model" $model) -}}
{{- $tokenizer := $item.engine.model.tokenizer -}}
{{- if eq $tokenizer "volume" -}}
{{- $tokenizer = printf "%s%s" (include "spillway.tokenizerRoot" $item) (trimPrefix (trimSuffix "/" $item.engine.model.volume.mountPath) $item.engine.model.path) -}}
{{- end -}}
{{- if ne $tokenizer "none" -}}{{- $_ := set $model "tokenizer" $tokenizer -}}{{- end -}}
{{- $models = append $models $model -}}
{{- end -}}
{{- $listen := dict "host" $root.Values.listenAddress "port" $gateway.port -}}
{{- with $gateway.opsPort -}}{{- $_ := set $listen "opsPort" . -}}{{- end -}}
{{- if $gateway.tls.secret.name -}}
{{- $folder := include "spillway.secretFolder" . -}}
{{- $_ := set $listen "tls" (dict "certFile" (printf "%s/tls.crt" $folder) "keyFile" (printf "%s/tls.key" $folder) "reloadSeconds" $gateway.tls.reloadSeconds) -}}
{{- end -}}
{{- $_ := set .out "listen" $listen -}}
{{- range $section := list "connections" "timeouts" "health" "limits" "routing" "breaker" "continuation" "admission" "cors" "index" "log" "audit" "tracing" "reload" -}}
{{- $settings := dict -}}
{{- range $key, $value := get $gateway $section -}}
{{- if not (or (hasPrefix "x-" $key) (kindIs "invalid" $value)) -}}{{- $_ := set $settings $key $value -}}{{- end -}}
{{- end -}}
{{- $_ := set $.out $section $settings -}}
{{- end -}}
{{- with include "spillway.engineEndSeconds" .engines -}}
{{- $health := get $.out "health" -}}
{{- if kindIs "invalid" $gateway.health.endingSeconds -}}{{- $_ := set $health "endingSeconds" (round (mulf 0.95 (float64 .)) 1) -}}{{- end -}}
{{- end -}}
{{- $_ = set .out "auth" (include "spillway.gatewayAuth" $gateway.auth | fromYaml) -}}
{{- range $setting := include "spillway.gatewaySizes" . | fromYamlArray -}}
{{- $section := get $.out (splitList "." $setting | first) -}}{{- $key := splitList "." $setting | last -}}
{{- $_ := set $section $key (int64 (include "spillway.bytes" (dict "value" (get $section $key) "path" (printf "gateway.%s" $setting)))) -}}
{{- end -}}
{{- $_ = set .out "shutdown" (dict "drainDelaySeconds" $gateway.lifecycle.drainDelaySeconds "drainTimeoutSeconds" $gateway.lifecycle.drainTimeoutSeconds) -}}
{{- if gt (int64 $gateway.processes) 1 -}}{{- $_ = set .out "processes" (int64 $gateway.processes) -}}{{- end -}}
{{- $_ = set .out "models" $models -}}
{{- end -}}

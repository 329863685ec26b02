{{/*
What will be rendered, decided in one place before any object is: every group of engines with its defaults laid out,
its accelerator, its memory and the YAML that its pods will read.

root: sets root.spillwayNames, the content of files/shared-names.json, and root.spillwayPlan. All templates of a render
share them and none may change them. The plan is a list of dicts with key, path, names (those of the root), name,
headless, model, engine, accelerator, platform, memory, shape, servedName, pods (replicas at most), of (version and kind
of what makes its pods), controller (that kind), settings (the engine service's own configuration), secretFiles (what of
which Secret becomes which file) and redisSecret.
Every template begins with it: which one Helm renders first is by chance, and it fails by the rules of _rules.tpl.
*/}}
{{- define "spillway.plan" -}}
{{- if not (hasKey . "spillwayPlan") -}}
{{- $_ := set . "spillwayNames" (.Files.Get "files/shared-names.json" | fromJson) -}}
{{- include "spillway.requireRules" (dict "root" . "rules" (list "removed" "name" "credential")) -}}
{{- $root := . -}}{{- $plan := list -}}{{- $groups := .Values.engines | default (dict "" dict) -}}
{{- range $key := keys $groups | sortAlpha -}}
{{- $item := dict "key" $key "names" $.spillwayNames
  "path" (ternary (printf "engines.%s" $key) "engine" (ne $key "")) -}}
{{- include "spillway.group" (dict "root" $root "item" $item "over" (get $groups $key | default dict | deepCopy)) -}}
{{- $plan = append $plan $item -}}
{{- end -}}
{{- $_ := set . "spillwayPlan" $plan -}}
{{- include "spillway.requireRules" (dict "root" . "rules" (list "key" "sealed" "auth" "engineKey" "served" "memory"
  "slab")) -}}
{{- end -}}{{- end -}}

{{/* (root, item, over): fills item for a group of engines whose values are over those of `engine`. */}}
{{- define "spillway.group" -}}
{{- $root := .root -}}{{- $item := .item -}}{{- $path := $item.path -}}
{{- $engine := deepCopy $root.Values.engine -}}
{{- /* An entry that names one of the two ways to size the CPU tier replaces the other. */ -}}
{{- $sizes := pick (default dict .over.offload) "numCpuBlocks" "cpuBytes" | keys -}}
{{- if eq (len $sizes) 1 -}}
{{- $_ := unset $engine.offload (eq (first $sizes) "cpuBytes" | ternary "numCpuBlocks" "cpuBytes") -}}
{{- end -}}
{{- include "spillway.overlay" (dict "base" $engine "over" .over) -}}
{{- include "spillway.wholeNumbers" $engine -}}
{{- $suffix := has $item.key (list "" "default") | ternary "engine" (printf "engine-%s" $item.key) -}}
{{- $name := include "spillway.name" (dict "root" $root "suffix" $suffix) -}}
{{- $accelerator := get ($root.Files.Get "files/accelerators.yaml" | fromYaml) $engine.accelerator.preset -}}
{{- include "spillway.accelerator" (dict "engine" $engine "accelerator" $accelerator) -}}
{{- $shape := dict -}}{{- $memory := dict -}}
{{- include "spillway.shape" (dict "engine" $engine "path" $path "root" $root "out" $shape) -}}
{{- include "spillway.memory" (dict "engine" $engine "path" $path "platform" $accelerator.platform "shape" $shape
  "names" $item.names "out" $memory) -}}
{{- $pods := ternary $engine.autoscaling.maxReplicas $engine.replicas $engine.autoscaling.enabled | int64 -}}
{{- $of := print "apps/v1/" $engine.controller -}}
{{- if gt (int64 $engine.nodesPerReplica) 1 -}}
{{- $of = "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet" -}}
{{- /* Its StatefulSets of further pods append the replica's number. */ -}}
{{- $name = include "spillway.fit" (dict "text" $name "max" 47) -}}{{- end -}}
{{- include "spillway.overlay" (dict "base" $item "over" (dict "name" $name
  "headless" (include "spillway.fit" (dict "text" (printf "%s-pods" $name) "max" 63))
  "model" (default "default" $item.key) "engine" $engine "accelerator" $accelerator
  "platform" $accelerator.platform "memory" $memory "shape" $shape "pods" $pods "of" $of "controller" (base $of)
  "servedName" (default (base $engine.model.path) $engine.model.servedName))) -}}
{{- include "spillway.engineSettings" (dict "root" $root "item" $item) -}}
{{- end -}}

{{/* (engine, accelerator): lays what the values say over the preset. */}}
{{- define "spillway.accelerator" -}}
{{- $given := .engine.accelerator -}}{{- $chosen := .accelerator -}}
{{- with $given.resourceName -}}{{- $_ := set $chosen "resourceName" . -}}{{- end -}}
{{- $_ := set $chosen "count" (include "spillway.ranks" .engine | int64) -}}
{{- if not (kindIs "invalid" $given.count) -}}{{- $_ := set $chosen "count" (int64 $given.count) -}}{{- end -}}
{{- if $given.fromClaims -}}{{- $_ := set $chosen "needsCount" false -}}{{- end -}}
{{- with $given.visibleDevices.mode -}}{{- $_ := set $chosen "visibleDevices" . -}}{{- end -}}
{{- $_ := set $chosen "env" (merge (include "spillway.hcclEnvironment" $given.hccl | fromYaml) $chosen.env) -}}
{{- if not (kindIs "invalid" .engine.schedulerName) -}}
{{- $_ := set $chosen "schedulerName" .engine.schedulerName -}}{{- end -}}
{{- if $given.lockMemory -}}
{{- $capabilities := default dict $chosen.securityContext.capabilities -}}
{{- $added := append (default list $capabilities.add) "IPC_LOCK" -}}
{{- $_ := set $chosen.securityContext "capabilities" (dict "drop" (default list $capabilities.drop) "add" $added) -}}
{{- end -}}
{{- if $given.privileged -}}
{{- $_ := set $chosen "securityContext" (dict "runAsUser" 0 "privileged" true) -}}{{- end -}}
{{- with .engine.podSecurityContext -}}{{- $_ := set $chosen "podSecurityContext" . -}}{{- end -}}
{{- with .engine.securityContext -}}{{- $_ := set $chosen "securityContext" . -}}{{- end -}}
{{- end -}}

{{/* (root, item): sets item.settings, the YAML of `python -m spillway_engine --config`. */}}
{{- define "spillway.engineSettings" -}}
{{- $engine := .item.engine -}}
{{- $model := pick $engine.model "path" "dtype" "kvCacheDtype" "maxLength" "seed" -}}
{{- $_ := set $model "servedName" .item.servedName -}}
{{- with $engine.model.quantization -}}{{- $_ := set $model "quantization" . -}}{{- end -}}
{{- $settings := pick $engine "port" "blockSize" "tensorParallelSize" "pipelineParallelSize" "dataParallelSize"
  "extraArgs" -}}
{{- if eq .item.controller "LeaderWorkerSet" -}}
{{- $_ := set $settings "nodesPerReplica" $engine.nodesPerReplica -}}{{- end -}}
{{- include "spillway.overlay" (dict "base" $settings "over" (dict "model" $model "host" .root.Values.listenAddress
  "platform" .item.platform "kvEvents" (pick $engine.kvEvents "enabled" "port" "replayPort")
  "extraEnv" (default dict $engine.extraEnv))) -}}
{{- with $engine.allowedMediaDomains -}}{{- $_ := set $settings "allowedMediaDomains" . -}}{{- end -}}
{{- if or $engine.lora.adapters $engine.lora.runtimeUpdating -}}
{{- $lora := pick $engine.lora "maxRank" "maxActive" -}}
{{- range $key := list "adapters" "runtimeUpdating" "resolverFolder" "maxInMemory" -}}
{{- with get $engine.lora $key -}}{{- $_ := set $lora $key . -}}{{- end -}}
{{- end -}}
{{- $_ := set $settings "lora" $lora -}}{{- end -}}
{{- if eq $engine.accelerator.versionCheck "warn" -}}{{- $_ := set $settings "versionCheck" "warn" -}}{{- end -}}
{{- with include "spillway.cpuBinding" .item -}}{{- $_ := set $settings "cpuBinding" . -}}{{- end -}}
{{- with .item.memory.deviceBlocks -}}{{- $_ := set $settings "deviceBlocks" . -}}{{- end -}}
{{- $offload := dict "enabled" $engine.offload.enabled -}}
{{- if $engine.offload.enabled -}}
{{- include "spillway.offloadSettings" (dict "root" .root "item" .item "out" $offload) -}}
{{- end -}}
{{- $_ = set $settings "offload" $offload -}}
{{- with $engine.kvTransfer -}}
{{- if .connector -}}
{{- $transfer := pick . "connector" "role" -}}
{{- with .modulePath -}}{{- $_ := set $transfer "modulePath" . -}}{{- end -}}
{{- with .extraConfig -}}{{- $_ := set $transfer "extraConfig" . -}}{{- end -}}
{{- $_ := set $settings "kvTransfer" $transfer -}}{{- end -}}{{- end -}}
{{- $lifecycle := pick $engine.lifecycle "drainDelaySeconds" "drainTimeoutSeconds" "stopTimeoutSeconds"
  "selfCheckText" "selfCheckTimeoutSeconds" -}}
{{- $isAuto := eq (toString $engine.lifecycle.selfCheck) "true" -}}
{{- $_ = set $lifecycle "selfCheck" (ternary "auto" (include "spillway.onOff" $engine.lifecycle.selfCheck) $isAuto) -}}
{{- $_ = set $settings "lifecycle" $lifecycle -}}
{{- /* What the values are called, for the messages of the engine service. */ -}}
{{- $path := .item.path -}}{{- $names := dict "host" "listenAddress" -}}
{{- range $setting, $value := .item.names.engineSettings -}}
{{- $_ := set $names $setting (printf "%s.%s" $path $value) -}}{{- end -}}
{{- $redis := $engine.offload.sharedTier.redis -}}
{{- range $setting := .item.names.redisLogin -}}
{{- if not (or $redis.existingSecret.name $redis.url (not $.root.Values.redis.enabled)) -}}
{{- $_ := set $names $setting "redis.existingSecret" -}}{{- end -}}{{- end -}}
{{- $_ = set $settings "settingNames" (dict "names" $names "others" (printf "%s.{path}" $path)) -}}
{{- $_ = set .item "settings" $settings -}}
{{- end -}}

{{/* (root, item, out): what the engine service reads of offload that is on, into out. */}}
{{- define "spillway.offloadSettings" -}}
{{- $offload := .item.engine.offload -}}{{- $out := .out -}}{{- $path := .item.path -}}
{{- include "spillway.passed" (dict "section" (omit $offload "sharedTier" "nodeTier") "out" $out) -}}
{{- if $offload.nodeTier.enabled -}}
{{- $_ := set $out "nodeTier" (dict "bytes" $offload.nodeTier.bytes "fallback" $offload.nodeTier.fallback
  "floor" $offload.nodeTier.floor "path" .item.names.folders.node "maker" "keeper") -}}{{- end -}}
{{- if $offload.numCpuBlocks -}}{{- $_ := unset $out "cpuBytes" -}}{{- end -}}
{{- $shared := dict -}}
{{- include "spillway.tierSettings" (dict "root" .root "item" .item "out" $shared) -}}
{{- $_ := set $out "sharedTier" $shared -}}{{- end -}}

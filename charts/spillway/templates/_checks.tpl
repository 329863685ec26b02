{{/* Contradictions that a schema cannot see, each with what to change. */}}

{{/* (root, item, problems) */}}
{{- define "spillway.engineChecks" -}}
{{- $root := .root -}}{{- $item := .item -}}{{- $problems := .problems -}}
{{- $engine := $item.engine -}}{{- $path := $item.path -}}{{- $offload := $engine.offload -}}
{{- $texts := list -}}

{{- if $offload.enabled -}}
{{- if and $offload.numCpuBlocks $offload.cpuBytes -}}
{{- $texts = append $texts (printf "%s.offload: numCpuBlocks: %d and cpuBytes: %v both size the CPU tier; set one of them to null" $path (int64 $offload.numCpuBlocks) $offload.cpuBytes) -}}
{{- else if not (or $offload.numCpuBlocks $offload.cpuBytes) -}}
{{- $texts = append $texts (printf "%s.offload: the CPU tier has no size; set numCpuBlocks (or cpuBytes), or offload.enabled: false" $path) -}}
{{- end -}}
{{- end -}}

{{- if and (eq $offload.transport "cpu") (ne $item.platform "cpu") -}}
{{- $texts = append $texts (printf "%s.offload.transport: cpu cannot reach the memory of a device; accelerator.preset: %s needs auto" $path $engine.accelerator.preset) -}}
{{- end -}}
{{- if and $offload.aclLibraryPath (eq $offload.transport "auto") (eq $item.platform "cpu") -}}
{{- $texts = append $texts (printf "%s.offload.aclLibraryPath: %s is read by transport: npu alone; with preset: cpu name the transport too" $path $offload.aclLibraryPath) -}}
{{- end -}}

{{- $ports := dict -}}
{{- $holders := dict "port" $engine.port -}}
{{- if $engine.kvEvents.enabled -}}{{- $_ := set $holders "kvEvents.port" $engine.kvEvents.port -}}{{- $_ = set $holders "kvEvents.replayPort" $engine.kvEvents.replayPort -}}{{- end -}}
{{- range $key, $port := $holders -}}
{{- $text := toString (int64 $port) -}}
{{- if hasKey $ports $text -}}{{- $texts = append $texts (printf "%s.%s: %s is also %s; give each its own port" $path $key $text (get $ports $text)) -}}{{- end -}}
{{- $_ := set $ports $text $key -}}
{{- end -}}
{{- $texts = concat $texts (include "spillway.rankPortProblems" $item | fromYamlArray) -}}

{{- if and $engine.autoscaling.enabled (gt (int64 $engine.autoscaling.minReplicas) (int64 $engine.autoscaling.maxReplicas)) -}}
{{- $texts = append $texts (printf "%s.autoscaling: minReplicas: %d is more than maxReplicas: %d; lower the first or raise the second" $path (int64 $engine.autoscaling.minReplicas) (int64 $engine.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- /* Not in the schema, whose refusals repeat a value: it may hold a password. */ -}}
{{- if not (regexMatch "^https?://[^ @]+$" $engine.autoscaling.prometheusAddress) -}}
{{- $texts = append $texts (printf "%s.autoscaling.prometheusAddress: text of %d characters given, an address such as http://prometheus-operated.monitoring.svc:9090, without credentials, needed; correct it" $path (len $engine.autoscaling.prometheusAddress)) -}}
{{- end -}}
{{- if and $engine.autoscaling.enabled (not ($root.Capabilities.APIVersions.Has "keda.sh/v1alpha1/ScaledObject")) -}}
{{- $texts = append $texts (printf "%s.autoscaling.enabled: this cluster has no keda.sh/v1alpha1 ScaledObject; install KEDA first (with helm template: -a keda.sh/v1alpha1/ScaledObject)" $path) -}}
{{- end -}}

{{- /* Devices. */ -}}
{{- $preset := $engine.accelerator.preset -}}
{{- $resource := $item.accelerator.resourceName -}}
{{- if $item.accelerator.needsCount -}}
{{- if not $resource -}}
{{- $texts = append $texts (printf "%s.accelerator.resourceName is empty; preset: %s needs the name that your device plugin advertises (kubectl describe node)" $path $preset) -}}
{{- end -}}
{{- $ranks := include "spillway.ranks" $engine | int64 -}}
{{- if lt (int64 $item.accelerator.count) $ranks -}}
{{- $stages := int64 $engine.pipelineParallelSize | eq 1 | ternary "" (printf " x pipelineParallelSize: %d" (int64 $engine.pipelineParallelSize)) -}}
{{- $stages = int64 $engine.dataParallelSize | eq 1 | ternary $stages (printf "%s x dataParallelSize: %d" $stages (int64 $engine.dataParallelSize)) -}}
{{- $texts = append $texts (printf "%s.accelerator.count: %d devices for tensorParallelSize: %d%s ranks; each rank needs one: set count >= %d or null" $path (int64 $item.accelerator.count) (int64 $engine.tensorParallelSize) $stages $ranks) -}}
{{- end -}}
{{- $variantIs310 := hasPrefix "310p" $engine.image.variant -}}
{{- $resourceIs310 := or (contains "310P" $resource) (hasSuffix "ascend-310" $resource) -}}
{{- if and (ne $variantIs310 $resourceIs310) (not $engine.image.tag) (not $engine.image.digest) -}}
{{- $texts = append $texts (printf "%s.image.variant: %q does not fit accelerator.resourceName: %s; the 310P boards need a 310p variant and only they do" $path $engine.image.variant $resource) -}}
{{- end -}}
{{- else -}}
{{- if or $engine.accelerator.resourceName $engine.accelerator.count -}}
{{- $texts = append $texts (printf "%s.accelerator: preset: cpu takes no devices; remove resourceName and count, or choose another preset" $path) -}}
{{- end -}}
{{- if or $engine.accelerator.driverMounts $engine.accelerator.roceMounts $engine.accelerator.privileged $engine.accelerator.visibleDevices.mode -}}
{{- $texts = append $texts (printf "%s.accelerator: driverMounts, roceMounts, privileged and visibleDevices mean nothing with preset: cpu; remove them" $path) -}}
{{- end -}}
{{- if $engine.image.variant -}}
{{- $texts = append $texts (printf "%s.image.variant: %q is an Ascend image; preset: cpu has no variants" $path $engine.image.variant) -}}
{{- end -}}
{{- end -}}
{{- $versions := list "0.23" "0.30" "0.32" -}}
{{- $given := kindIs "string" $engine.image.vllm | ternary (printf "%q" (toString $engine.image.vllm)) (toString $engine.image.vllm) -}}
{{- if not (and (kindIs "string" $engine.image.vllm) (has $engine.image.vllm $versions)) -}}
{{- $texts = append $texts (printf "%s.image.vllm: %s has no engine image; there are images of vLLM 0.23, 0.30 and 0.32: write one of them in quotes, e.g. vllm: \"0.32\"" $path $given) -}}
{{- else if and (ne $engine.image.vllm "0.23") (hasPrefix "a5" $engine.image.variant) (not $engine.image.tag) (not $engine.image.digest) -}}
{{- $texts = append $texts (printf "%s.image.variant: %q has a base image for vllm: \"0.23\" alone; with vllm: %s name an image of your own by image.tag or image.digest, or set vllm: \"0.23\"" $path $engine.image.variant $given) -}}
{{- end -}}
{{- if and (has (toString $engine.image.vllm) (rest $versions)) (eq (include "spillway.onOff" $engine.offload.layerwiseLoads) "on") -}}
{{- $texts = append $texts (printf "%s.offload.layerwiseLoads: on needs vLLM 0.23, but %s.image.vllm is %s; set it to off, or vllm: \"0.23\"" $path $path $given) -}}
{{- end -}}
{{- if and $engine.accelerator.privileged $engine.securityContext (not (default dict $engine.securityContext).privileged) -}}
{{- $texts = append $texts (printf "%s.accelerator.privileged: true makes the chart's own security context privileged, but %s.securityContext replaces it; add privileged: true there, or remove one of the two" $path $path) -}}
{{- end -}}
{{- with $engine.securityContext -}}
{{- $added := list -}}{{- with .capabilities -}}{{- $added = default list .add -}}{{- end -}}
{{- if and $engine.accelerator.lockMemory (not .privileged) (not (has "IPC_LOCK" $added)) (not (has "ALL" $added)) -}}
{{- $texts = append $texts (printf "%s.accelerator.lockMemory: true adds IPC_LOCK to the chart's own security context, but %s.securityContext replaces it; add capabilities.add: [IPC_LOCK] there, or remove one of the two" $path $path) -}}
{{- end -}}
{{- end -}}
{{- $mode := $item.accelerator.visibleDevices -}}
{{- if and (eq $mode "literal") (not $engine.accelerator.visibleDevices.value) -}}
{{- $texts = append $texts (printf "%s.accelerator.visibleDevices.value is empty; mode: literal needs one, e.g. \"0,1\"" $path) -}}
{{- end -}}
{{- if and (eq $mode "literal") $engine.accelerator.visibleDevices.value -}}
{{- $devices := splitList "," $engine.accelerator.visibleDevices.value -}}
{{- $ranks := include "spillway.ranks" $engine | int -}}
{{- if or (not (regexMatch "^[0-9]+(,[0-9]+)*$" $engine.accelerator.visibleDevices.value)) (ne (len (uniq $devices)) (len $devices)) (lt (len $devices) $ranks) -}}
{{- $texts = append $texts (printf "%s.accelerator.visibleDevices.value: %q given, numbers of devices with commas between them needed, each once and one for each of %d ranks; write %q, for example" $path $engine.accelerator.visibleDevices.value $ranks (untilStep 0 $ranks 1 | join ",")) -}}
{{- end -}}
{{- end -}}
{{- if and (ne $mode "literal") $engine.accelerator.visibleDevices.value -}}
{{- $texts = append $texts (printf "%s.accelerator.visibleDevices.value: %q is read with mode: literal alone; the mode is %s" $path $engine.accelerator.visibleDevices.value $mode) -}}
{{- end -}}
{{- if and $item.shape.kvHeads (not $item.shape.latentDim) -}}
{{- $heads := int64 $item.shape.kvHeads -}}{{- $ranks := int64 $engine.tensorParallelSize -}}
{{- if and (lt $ranks $heads) (mod $heads $ranks) -}}
{{- $texts = append $texts (printf "%s.tensorParallelSize: %d does not divide the model's %d KV heads; vLLM needs a divisor, or a multiple of it" $path $ranks $heads) -}}
{{- end -}}
{{- end -}}

{{- /* Where the model lies. */ -}}
{{- $volume := $engine.model.volume -}}
{{- $isFolder := hasPrefix "/" $engine.model.path -}}
{{- if and $isFolder (eq $volume.type "none") -}}
{{- $texts = append $texts (printf "%s.model.path: %s is a folder, but no volume brings it; set model.volume.type to existingClaim, hostPath or nfs, or to image when the engine image holds it" $path $engine.model.path) -}}
{{- end -}}
{{- if and (not $isFolder) (ne $volume.type "none") -}}
{{- $texts = append $texts (printf "%s.model.path: %s is a hub name, but model.volume.type is %s; write the folder below %s, or type: none" $path $engine.model.path $volume.type $volume.mountPath) -}}
{{- end -}}
{{- with $root.Values.networkPolicy -}}
{{- if and .enabled .restrictEgress (eq $engine.model.cache.type "emptyDir") (not .engineEgress) -}}
{{- if not $isFolder -}}
{{- $texts = append $texts (printf "networkPolicy.restrictEgress: true closes the way to the hub that %s.model.path: %s comes from; list it in networkPolicy.engineEgress, or bring the model by model.volume" $path $engine.model.path) -}}
{{- end -}}
{{- range $index, $adapter := $engine.lora.adapters -}}
{{- if not (hasPrefix "/" $adapter.path) -}}
{{- $texts = append $texts (printf "networkPolicy.restrictEgress: true closes the way to the hub that %s.lora.adapters[%d].path: %s comes from; list it in networkPolicy.engineEgress, or bring the adapter by lora.volume" $path $index $adapter.path) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $isFolder (has $volume.type (list "existingClaim" "hostPath" "nfs")) (not (hasPrefix (printf "%s/" (trimSuffix "/" $volume.mountPath)) (printf "%s/" $engine.model.path))) -}}
{{- $texts = append $texts (printf "%s.model.path: %s does not lie below model.volume.mountPath: %s, where the volume is; change one of the two" $path $engine.model.path $volume.mountPath) -}}
{{- end -}}
{{- if and (not $isFolder) (not (regexMatch "^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$" $engine.model.path)) -}}
{{- $texts = append $texts (printf "%s.model.path: %q is neither an absolute folder nor a hub name; write /models/Qwen3-8B or Qwen/Qwen3-8B, for example" $path $engine.model.path) -}}
{{- end -}}
{{- if and $isFolder (regexMatch "(/\\.\\.?(/|$)|\\s$)" $engine.model.path) -}}
{{- $texts = append $texts (printf "%s.model.path: %q given, an absolute folder without .. in it and without a blank at its end needed; correct it" $path $engine.model.path) -}}
{{- end -}}
{{- $hubIsOff := "" -}}
{{- range $name := list "HF_HUB_OFFLINE" "TRANSFORMERS_OFFLINE" -}}
{{- if has (lower (toString (get (default dict $engine.extraEnv) $name))) (list "1" "on" "yes" "true") -}}{{- $hubIsOff = $name -}}{{- end -}}
{{- end -}}
{{- if and $hubIsOff (eq $engine.model.cache.type "emptyDir") (include "spillway.usesHub" $engine) -}}
{{- $texts = append $texts (printf "%s.extraEnv: %s forbids the download of what has a hub name, and model.cache.type: emptyDir begins empty; remove it, or bring a filled cache by model.cache.type: existingClaim or hostPath" $path $hubIsOff) -}}
{{- end -}}
{{- range $need := list (list "existingClaim" "claimName") (list "hostPath" "hostPath") -}}
{{- if and (eq $volume.type (index $need 0)) (not (get $volume (index $need 1))) -}}
{{- $texts = append $texts (printf "%s.model.volume.%s is empty; type: %s needs it" $path (index $need 1) (index $need 0)) -}}
{{- end -}}
{{- if and (eq $engine.model.cache.type (index $need 0)) (not (get $engine.model.cache (index $need 1))) -}}
{{- $texts = append $texts (printf "%s.model.cache.%s is empty; type: %s needs it" $path (index $need 1) (index $need 0)) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $volume.type "nfs") (not (and $volume.nfs.server $volume.nfs.path)) -}}
{{- $texts = append $texts (printf "%s.model.volume.nfs: type: nfs needs server and path" $path) -}}
{{- end -}}
{{- $tokenizer := $engine.model.tokenizer -}}
{{- if and (eq $tokenizer "volume") (not (has $volume.type (list "existingClaim" "hostPath" "nfs"))) -}}
{{- $texts = append $texts (printf "%s.model.tokenizer: volume needs model.volume.type existingClaim (ReadOnlyMany or ReadWriteMany), hostPath or nfs; it is %s" $path $volume.type) -}}
{{- end -}}
{{- if and (not (has $tokenizer (list "none" "volume"))) (not (hasPrefix "/" $tokenizer)) -}}
{{- $texts = append $texts (printf "%s.model.tokenizer: %q is none of none, volume and an absolute folder; write one of these" $path $tokenizer) -}}
{{- end -}}

{{- /* The environment. */ -}}
{{- if hasKey (default dict $engine.extraEnv) "PYTHONHASHSEED" -}}
{{- $texts = append $texts (printf "%s.extraEnv: PYTHONHASHSEED is the chart's own, equal on all engines; with another value no engine finds what others stored" $path) -}}
{{- end -}}
{{- $byPlugin := dict "npu" (dict "ASCEND_RT_VISIBLE_DEVICES" "set accelerator.visibleDevices in its place" "ASCEND_VISIBLE_DEVICES" "set accelerator.visibleDevices in its place") "cuda" (dict "CUDA_VISIBLE_DEVICES" "remove it" "NVIDIA_VISIBLE_DEVICES" "remove it") "cpu" dict -}}
{{- $given := keys (default dict $engine.extraEnv) -}}
{{- range $engine.extraEnvVars -}}{{- $given = append $given .name -}}{{- end -}}
{{- range $name, $remedy := get $byPlugin $item.platform -}}
{{- if has $name $given -}}
{{- $texts = append $texts (printf "%s.extraEnv: %s chooses devices beside the device plugin, which gives each pod its own; %s" $path $name $remedy) -}}
{{- end -}}
{{- end -}}
{{- /* What the chart sets without them, and what it sets with other values only. */ -}}
{{- $seen := dict -}}
{{- $reserved := list "HF_TOKEN" "VLLM_API_KEY" "SPILLWAY_REDIS_USERNAME" "SPILLWAY_REDIS_PASSWORD" "SPILLWAY_VISIBLE_DEVICES" -}}
{{- $own := omit $item "engine" "accelerator" -}}
{{- $_ := set $own "engine" (omit $engine "extraEnvVars") -}}
{{- $_ = set $own "accelerator" (omit $item.accelerator "env") -}}
{{- range include "spillway.engineEnvironment" (dict "root" $root "item" $own) | fromYamlArray -}}{{- $reserved = append $reserved .name -}}{{- end -}}
{{- range $engine.extraEnvVars -}}
{{- if has .name $reserved -}}{{- $texts = append $texts (printf "%s.extraEnvVars: %s is set by the chart; remove it" $path .name) -}}{{- end -}}
{{- if hasKey (default dict $engine.extraEnv) .name -}}{{- $texts = append $texts (printf "%s.extraEnvVars: %s is in extraEnv too; give it once" $path .name) -}}{{- end -}}
{{- if hasKey $seen .name -}}{{- $texts = append $texts (printf "%s.extraEnvVars: %s is listed twice; remove one" $path .name) -}}{{- end -}}
{{- $_ := set $seen .name true -}}
{{- end -}}
{{- range include "spillway.extraArgumentProblems" (dict "root" $root "item" $item) | fromYamlArray -}}{{- $texts = append $texts . -}}{{- end -}}
{{- range include "spillway.volumeNameProblems" (dict "path" $path "section" $engine "own" (include
  "spillway.engineVolumeNames" (dict "root" $root "item" $item) | fromYamlArray)) | fromYamlArray -}}{{- $texts =
  append $texts . -}}{{- end -}}
{{- range $texts -}}{{- include "spillway.problem" (dict "problems" $problems "text" .) -}}{{- end -}}
{{- end -}}

{{/* (path, section, own) -> list of texts: extraVolumes may not bear names of the chart's own volumes. */}}
{{- define "spillway.volumeNameProblems" -}}
{{- $texts := list -}}
{{- range .section.extraVolumes -}}
{{- if has .name $.own -}}{{- $texts = append $texts (printf "%s.extraVolumes: %s is the name of a volume of the chart's own; choose another" $.path .name) -}}{{- end -}}
{{- end -}}
{{- toYaml $texts -}}
{{- end -}}

{{/* (root, engines, problems) */}}
{{- define "spillway.releaseChecks" -}}
{{- $root := .root -}}{{- $values := $root.Values -}}{{- $problems := .problems -}}
{{- $texts := list -}}
{{- $served := dict -}}
{{- $names := dict -}}
{{- $redisUsed := false -}}
{{- $folders := dict -}}
{{- include "spillway.secretReferenceChecks" (dict "path" "" "value" (omit $values "extraObjects") "problems" $problems) -}}
{{- range $item := .engines -}}
{{- $own := concat (list $item.servedName) (default list $item.engine.model.aliases) -}}
{{- range $item.engine.lora.adapters -}}{{- $own = append $own .name -}}{{- end -}}
{{- range $item.engine.lora.aliases -}}{{- $own = append $own .name -}}{{- end -}}
{{- $tier := $item.engine.offload.sharedTier -}}
{{- if and (include "spillway.usesNvme" $item) (has $tier.nvme.volume.type (list "hostPath" "existingClaim")) -}}
{{- $at := printf "%s.offload.sharedTier.nvme" $item.path -}}
{{- $folder := printf "%s %s" $tier.nvme.volume.type (ternary (trimSuffix "/" $tier.nvme.volume.hostPath) $tier.nvme.volume.claimName (eq $tier.nvme.volume.type "hostPath")) -}}
{{- $other := get $folders $folder -}}
{{- if $other -}}
{{- if and (ne $tier.nvme.mode $other.mode) (ne $tier.nvme.mode "auto") (ne $other.mode "auto") -}}
{{- $texts = append $texts (printf "%s.mode: %s given, but %s stores as %s in the same folder (%s); set one mode for both, or give each a folder of its own" $at $tier.nvme.mode $other.path $other.mode $folder) -}}
{{- end -}}
{{- if ne (toString $tier.nvme.maxBytes) $other.maxBytes -}}
{{- $texts = append $texts (printf "%s.maxBytes: %v given, but %s has %s for the same folder (%s), and the bound is of all together; give both the same, or each a folder of its own" $at (default "null" $tier.nvme.maxBytes) $other.path (ternary "null" $other.maxBytes (eq $other.maxBytes "<nil>")) $folder) -}}
{{- end -}}
{{- else -}}
{{- $_ := set $folders $folder (dict "path" $item.path "mode" $tier.nvme.mode "maxBytes" (toString $tier.nvme.maxBytes)) -}}
{{- end -}}
{{- end -}}
{{- range $name := $own -}}
{{- if hasKey $served $name -}}
{{- $texts = append $texts (printf "%s: the name %q is already served by %s; give one of them another model.servedName, alias or name of an adapter" $item.path $name (get $served $name)) -}}
{{- end -}}
{{- $_ := set $served $name $item.path -}}
{{- end -}}
{{- if and $item.engine.offload.enabled (eq $item.engine.offload.sharedTier.type "redis") (not $item.engine.offload.sharedTier.redis.url) -}}{{- $redisUsed = true -}}{{- end -}}
{{- end -}}
{{- if and $values.redis.enabled (not $redisUsed) -}}
{{- $texts = append $texts "redis.enabled: true, but no engine uses it; set engine.offload.sharedTier.type: redis with an empty url, or redis.enabled: false" -}}
{{- end -}}
{{- range include "spillway.volumeNameProblems" (dict "path" "redis" "section" $values.redis "own" (list "config" "scratch")) | fromYamlArray -}}{{- $texts = append $texts . -}}{{- end -}}
{{- $seen := dict -}}
{{- range $values.redis.extraEnvVars -}}
{{- if hasKey $seen .name -}}{{- $texts = append $texts (printf "redis.extraEnvVars: %s is listed twice; remove one" .name) -}}{{- end -}}
{{- $_ := set $seen .name true -}}
{{- if eq .name "VALKEY_PASSWORD" -}}{{- $texts = append $texts "redis.extraEnvVars: VALKEY_PASSWORD is set by the chart; name the Secret in redis.existingSecret" -}}{{- end -}}
{{- end -}}
{{- $needs := list
  (list $values.gateway.httpRoute.enabled "gateway.httpRoute.enabled" "gateway.networking.k8s.io/v1/HTTPRoute" "the Gateway API")
  (list $values.monitoring.podMonitor.enabled "monitoring.podMonitor.enabled" "monitoring.coreos.com/v1/PodMonitor" "the Prometheus operator")
  (list $values.monitoring.serviceMonitor.enabled "monitoring.serviceMonitor.enabled" "monitoring.coreos.com/v1/ServiceMonitor" "the Prometheus operator")
  (list $values.monitoring.alerts.enabled "monitoring.alerts.enabled" "monitoring.coreos.com/v1/PrometheusRule" "the Prometheus operator")
-}}
{{- range $need := $needs -}}
{{- if and (index $need 0) (not ($root.Capabilities.APIVersions.Has (index $need 2))) -}}
{{- $texts = append $texts (printf "%s: this cluster has no %s; install %s first (with helm template: -a %s)" (index $need 1) (index $need 2) (index $need 3) (index $need 2)) -}}
{{- end -}}
{{- end -}}
{{- range $texts -}}{{- include "spillway.problem" (dict "problems" $problems "text" .) -}}{{- end -}}
{{- end -}}

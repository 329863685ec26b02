{{/* The parts of an engine pod that have arithmetic or cases in them. */}}

{{/* (root, item[, forHash]): the files of an engine's ConfigMap; their hash restarts the pods, and only these. forHash: without
what the settings are called, which changes when `engine` becomes an entry of `engines` and is no reason to restart. */}}
{{- define "spillway.engineFiles" -}}
engine.yaml: |
  # Written by the chart; read by spillway_engine, which adds the pod's name.
  {{- toYaml (ternary (omit .item.settings "door") .item.settings (default false .forHash)) | nindent 2 }}
memory.json: |
  {{ toPrettyJson (omit .item.memory "arithmetic") | nindent 2 | trim }}
{{- if eq .item.platform "npu" }}
start-engine.sh: |
  {{- .root.Files.Get "files/start-ascend.sh" | nindent 2 }}
{{- end }}
{{- end -}}

{{/* engine -> name and number of the ports of KV events, as a YAML list: of each data parallel rank two. */}}
{{- define "spillway.eventPorts" -}}
{{- $ports := list -}}
{{- if .kvEvents.enabled -}}
{{- range $rank := until (int .dataParallelSize) -}}
{{- $end := eq $rank 0 | ternary "" (printf "-%d" $rank) -}}
{{- $ports = append $ports (dict "name" (printf "kv-events%s" $end) "port" (add (int64 $.kvEvents.port) $rank)) -}}
{{- $ports = append $ports (dict "name" (printf "kv-replay%s" $end) "port" (add (int64 $.kvEvents.replayPort) $rank)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $ports -}}
{{- end -}}

{{/* engine -> the same ports in a NetworkPolicy, which takes a range by numbers alone. */}}
{{- define "spillway.eventPolicyPorts" -}}
{{- $more := sub (int64 .dataParallelSize) 1 -}}
{{- if and .kvEvents.enabled (eq $more 0) -}}
- {protocol: TCP, port: kv-events}
- {protocol: TCP, port: kv-replay}
{{- else if .kvEvents.enabled -}}
- {protocol: TCP, port: {{ int64 .kvEvents.port }}, endPort: {{ add (int64 .kvEvents.port) $more }}}
- {protocol: TCP, port: {{ int64 .kvEvents.replayPort }}, endPort: {{ add (int64 .kvEvents.replayPort) $more }}}
{{- end -}}
{{- end -}}

{{/* item -> seconds from SIGTERM's decision to SIGKILL: every phase of spillway_engine.launch, and some to spare. */}}
{{- define "spillway.engineGraceSeconds" -}}
{{- $lifecycle := .engine.lifecycle -}}
{{- /* 10: the drain's own answer, 10: reaping and removing shared memory. */ -}}
{{ ceil (addf $lifecycle.preStopSeconds $lifecycle.drainDelaySeconds $lifecycle.drainTimeoutSeconds $lifecycle.stopTimeoutSeconds 20) | int64 }}
{{- end -}}

{{/* (root, item) -> environment of the engine container. */}}
{{- define "spillway.engineEnvironment" -}}
{{- $engine := .item.engine -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: VLLM_HOST_IP, value: $(POD_IP)}
# Block hashes start from this seed: one value for all engines, or no engine hits what another one stored.
- {name: PYTHONHASHSEED, value: "0"}
- {name: HOME, value: /var/lib/spillway/home}
# PyTorch looks up the user's name, and the pod's user is in no password file.
- {name: USER, value: spillway}
- {name: HF_HOME, value: /var/lib/spillway/hub}
{{- $given := keys (default dict $engine.extraEnv) }}
{{- range $engine.extraEnvVars }}{{ $given = append $given .name }}{{ end }}
{{- range $name, $value := .item.accelerator.env }}
{{- if not (has $name $given) }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}
{{- if eq .item.platform "npu" }}
- {name: SPILLWAY_VISIBLE_DEVICES, value: {{ .item.accelerator.visibleDevices }}}
{{- if eq .item.accelerator.visibleDevices "literal" }}
- {name: ASCEND_RT_VISIBLE_DEVICES, value: {{ $engine.accelerator.visibleDevices.value | quote }}}
{{- end }}
{{- end }}
{{- with $engine.model.hubTokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}}
{{- end }}
{{- end }}
{{- with $engine.apiKeySecret }}
{{- if .name }}
- name: VLLM_API_KEY
  valueFrom: {secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}}
{{- end }}
{{- end }}
{{- with .item.redisSecret }}
{{- if .name }}
{{- if .usernameKey }}
- name: SPILLWAY_REDIS_USERNAME
  valueFrom: {secretKeyRef: {name: {{ .name | quote }}, key: {{ .usernameKey | quote }}}}
{{- end }}
{{- if eq .passwordAs "env" }}
- name: SPILLWAY_REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ .name | quote }}, key: {{ .passwordKey | quote }}}}
{{- end }}
{{- end }}
{{- end }}
{{- with $engine.extraEnvVars }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* (item, ephemeral) -> what an engine requests and is limited to alike, and its ephemeral storage. */}}
{{- define "spillway.engineResources" -}}
memory: {{ include "spillway.quantity" .item.memory.memoryLimitBytes }}
{{- if .item.accelerator.needsCount }}
{{ .item.accelerator.resourceName }}: {{ .item.accelerator.count }}
{{- end }}
{{- with .item.engine.accelerator.memoryMiB }}
{{ $.item.accelerator.resourceName }}-memory: {{ int64 . }}
{{- end }}
{{- with .item.engine.hugePages }}
{{- if .amount }}
hugepages-{{ .pageSize }}: {{ include "spillway.quantity" (include "spillway.bytes" (dict "value" .amount "path" (printf "%s.hugePages.amount" $.item.path))) }}
{{- end }}
{{- end }}
{{- range $name, $amount := .item.engine.accelerator.extraResources }}
{{ $name }}: {{ toString $amount | quote }}
{{- end }}
{{- with .ephemeral }}
ephemeral-storage: {{ include "spillway.quantity" (include "spillway.bytes" (dict "value" . "path" (printf "%s.ephemeralStorage" $.item.path))) }}
{{- end }}
{{- end -}}

{{/* engine -> does the model or an adapter come from a hub? */}}
{{- define "spillway.usesHub" -}}
{{- $found := not (hasPrefix "/" .model.path) -}}
{{- range .lora.adapters -}}{{- $found = or $found (not (hasPrefix "/" .path)) -}}{{- end -}}
{{- if $found -}}true{{- end -}}
{{- end -}}

{{/* engine -> do adapters come from a volume of their own? */}}
{{- define "spillway.adapterVolume" -}}
{{- if and (or .lora.adapters .lora.runtimeUpdating) (has .lora.volume.type (list "existingClaim" "hostPath" "nfs")) -}}true{{- end -}}
{{- end -}}

{{/* item -> is there a folder for the shared tier in the pod? */}}
{{- define "spillway.usesNvme" -}}
{{- if and .engine.offload.enabled (eq .engine.offload.sharedTier.type "nvme") -}}true{{- end -}}
{{- end -}}

{{/* (root, item) -> name of the claim that the chart makes for a sharedClaim. */}}
{{- define "spillway.nvmeClaim" -}}
{{- include "spillway.fit" (dict "text" (printf "%s-kv" .item.name) "max" 63) -}}
{{- end -}}

{{/* (root, item) -> volumeMounts of the engine container. */}}
{{- define "spillway.engineMounts" -}}
{{- $engine := .item.engine -}}
- {name: config, mountPath: /etc/spillway, readOnly: true}
# vLLM's queues and the CPU tier.
- {name: shared-memory, mountPath: /dev/shm}
- {name: scratch, mountPath: /tmp, subPath: tmp}
- {name: scratch, mountPath: /var/lib/spillway/home, subPath: home}
{{- if hasPrefix "/" $engine.model.path }}
{{- if has $engine.model.volume.type (list "existingClaim" "hostPath" "nfs") }}
- {name: model, mountPath: {{ $engine.model.volume.mountPath | quote }}, readOnly: true}
{{- end }}
{{- end }}
{{- if include "spillway.usesHub" $engine }}
- {name: hub, mountPath: /var/lib/spillway/hub}
{{- end }}
{{- if include "spillway.adapterVolume" $engine }}
- {name: adapters, mountPath: {{ $engine.lora.volume.mountPath | quote }}, readOnly: true}
{{- end }}
{{- if include "spillway.usesNvme" .item }}
- {name: kv, mountPath: {{ $engine.offload.sharedTier.nvme.path | quote }}}
{{- end }}
{{- if .item.secretFiles }}
- {name: secrets, mountPath: {{ include "spillway.secretFolder" . }}, readOnly: true}
{{- end }}
{{- if $engine.hugePages.amount }}
- {name: hugepages, mountPath: {{ $engine.hugePages.mountPath | quote }}}
{{- end }}
{{- range (include "spillway.driverMounts" . | fromYamlArray) }}
- {name: {{ .name }}, mountPath: {{ .path }}, readOnly: true}
{{- end }}
{{- with $engine.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* (root, item) -> the host files to mount, as a YAML list. */}}
{{- define "spillway.driverMounts" -}}
{{- $known := .root.Files.Get "files/driver-mounts.yaml" | fromYaml -}}
{{- $mounts := list -}}
{{- if .item.engine.accelerator.driverMounts -}}
{{- range $known.driver -}}
{{- if or (ne .name "npu-smi") $.item.engine.accelerator.npuSmiPath -}}{{- $mounts = append $mounts . -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- if .item.engine.accelerator.roceMounts -}}{{- $mounts = concat $mounts $known.roce -}}{{- end -}}
{{- toYaml $mounts -}}
{{- end -}}

{{/* (root, item) -> names that volumes of an engine pod may have here or with other settings. */}}
{{- define "spillway.engineVolumeNames" -}}
{{- $names := list "config" "shared-memory" "scratch" "model" "hub" "adapters" "kv" "secrets" "hugepages" -}}
{{- range include "spillway.driverMounts" . | fromYamlArray -}}{{- $names = append $names .name -}}{{- end -}}
{{- toYaml $names -}}
{{- end -}}

{{/* (root, item) -> volumes of an engine pod. */}}
{{- define "spillway.engineVolumes" -}}
{{- $engine := .item.engine -}}
- name: config
  configMap: {name: {{ .item.name }}}
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: {{ include "spillway.quantity" .item.memory.sharedMemoryBytes }}}
- name: scratch
  emptyDir: {}
{{- if hasPrefix "/" $engine.model.path }}
{{- $volume := $engine.model.volume }}
{{- if has $volume.type (list "existingClaim" "hostPath" "nfs") }}
- name: model
  {{ include "spillway.volumeSource" (merge (dict "readOnly" true) $volume) }}
{{- end }}
{{- end }}
{{- if include "spillway.usesHub" $engine }}
{{- $cache := deepCopy $engine.model.cache }}
{{- with $cache.sizeLimit }}
{{- $_ := set $cache "sizeLimit" (include "spillway.quantity" (include "spillway.bytes" (dict "value" . "path" (printf "%s.model.cache.sizeLimit" $.item.path)))) }}
{{- end }}
- name: hub
  {{ include "spillway.volumeSource" $cache }}
{{- end }}
{{- if include "spillway.adapterVolume" $engine }}
- name: adapters
  {{ include "spillway.volumeSource" (merge (dict "readOnly" true) $engine.lora.volume) }}
{{- end }}
{{- if include "spillway.usesNvme" .item }}
{{- $volume := deepCopy $engine.offload.sharedTier.nvme.volume }}
{{- $_ := set $volume "sizeLimit" (include "spillway.quantity" (include "spillway.bytes" (dict "value" $volume.size "path" (printf "%s.offload.sharedTier.nvme.volume.size" $.item.path)))) }}
{{- if eq $volume.type "sharedClaim" }}
{{- $_ = set $volume "type" "existingClaim" }}
{{- $_ = set $volume "claimName" (include "spillway.nvmeClaim" .) }}
{{- end }}
{{- if ne $volume.type "perPodClaim" }}
- name: kv
  {{ include "spillway.volumeSource" $volume }}
{{- end }}
{{- end }}
{{- with .item.secretFiles }}
{{ include "spillway.secretsVolume" . }}
{{- end }}
{{- if $engine.hugePages.amount }}
- name: hugepages
  emptyDir: {medium: HugePages-{{ $engine.hugePages.pageSize }}}
{{- end }}
{{- range (include "spillway.driverMounts" . | fromYamlArray) }}
- name: {{ .name }}
  hostPath: {path: {{ eq .name "npu-smi" | ternary $engine.accelerator.npuSmiPath .path }}, type: {{ .type }}}
{{- end }}
{{- with $engine.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* (engines): seconds from an engine's SIGTERM to the end of its drain, of the one that gives the least; empty without engines, or when that is 0. */}}
{{- define "spillway.engineEndSeconds" -}}
{{- $least := 0.0 -}}
{{- range $item := . -}}
{{- $own := addf $item.engine.lifecycle.drainDelaySeconds $item.engine.lifecycle.drainTimeoutSeconds -}}
{{- if or (eq $least 0.0) (lt $own $least) -}}{{- $least = $own -}}{{- end -}}
{{- end -}}
{{- if gt $least 0.0 -}}{{- $least -}}{{- end -}}
{{- end -}}

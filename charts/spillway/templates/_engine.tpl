{{/* The parts of an engine pod that have arithmetic or cases in them. */}}

{{/* (root, item[, forHash]): the files of an engine's ConfigMap; their hash restarts the pods, and only these. forHash:
without what the settings are called, which changes when `engine` becomes an entry of `engines`. */}}
{{- define "spillway.engineFiles" -}}
engine.yaml: |
  # Written by the chart; read by spillway_engine, which adds the pod's name.
  {{- toYaml (ternary (omit .item.settings "settingNames") .item.settings (default false .forHash)) | nindent 2 }}
memory.json: |
  {{ toPrettyJson (omit .item.memory "arithmetic") | nindent 2 | trim }}
{{- if eq .item.platform "npu" }}
start-engine.sh: |
  {{- .root.Files.Get "files/start-ascend.sh" | nindent 2 }}
{{- end }}{{- end -}}

{{/* engine -> name and number of the first pod's ports of KV events, as a YAML list: two of each rank there. */}}
{{- define "spillway.eventPorts" -}}
{{- $ports := list -}}
{{- if .kvEvents.enabled -}}
{{- range $rank := div .dataParallelSize .nodesPerReplica | max 1 | int | until -}}
{{- $end := eq $rank 0 | ternary "" (printf "-%d" $rank) -}}
{{- $ports = append $ports (dict "name" (print "kv-events" $end) "port" (add (int64 $.kvEvents.port) $rank)) -}}
{{- $ports = append $ports (dict "name" (print "kv-replay" $end) "port" (add (int64 $.kvEvents.replayPort) $rank)) -}}
{{- end -}}{{- end -}}
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
{{- end -}}{{- end -}}

{{/* item -> seconds from SIGTERM's decision to SIGKILL: every phase of spillway_engine.launch, and some to spare. */}}
{{- define "spillway.engineGraceSeconds" -}}
{{- with .engine.lifecycle -}}
{{- /* 10: the drain's own answer, 10: reaping and removing shared memory. */ -}}
{{ ceil (addf .preStopSeconds .drainDelaySeconds .drainTimeoutSeconds .stopTimeoutSeconds 20) | int64 }}
{{- end -}}{{- end -}}

{{/* (root, item) -> environment of the engine container. */}}
{{- define "spillway.engineEnvironment" -}}
{{- $engine := .item.engine -}}{{- $names := .item.names -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: VLLM_HOST_IP, value: $(POD_IP)}
# Block hashes start from this seed: one value for all engines, or no engine hits what another one stored.
- {name: PYTHONHASHSEED, value: "0"}
- {name: HOME, value: {{ $names.folders.home }}}
# PyTorch looks up the user's name, and the pod's user is in no password file.
- {name: USER, value: spillway}
- {name: HF_HOME, value: {{ $names.folders.hub }}}
{{- $given := keys (default dict $engine.extraEnv) }}
{{- range $engine.extraEnvVars }}{{ $given = append $given .name }}{{ end }}
{{- range $name, $value := .item.accelerator.env }}
{{- if not (has $name $given) }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}{{- end }}
{{- if eq .item.platform "npu" }}
- {name: {{ $names.variables.visibleDevices }}, value: {{ .item.accelerator.visibleDevices }}}
{{- if eq .item.accelerator.visibleDevices "literal" }}
- {name: ASCEND_RT_VISIBLE_DEVICES, value: {{ $engine.accelerator.visibleDevices.value | quote }}}
{{- end }}{{- end }}
{{- $redis := default (dict "passwordAs" "") .item.redisSecret }}{{- $tier := $engine.offload.sharedTier }}
{{- $inBucket := and $engine.offload.enabled (has "s3" (list $tier.type $tier.below.type)) }}
{{- $s3 := ternary $tier.s3.existingSecret (dict "name" "") $inBucket }}
{{- range list (list "HF_TOKEN" $engine.model.hubTokenSecret.name $engine.model.hubTokenSecret.key)
  (list "VLLM_API_KEY" $engine.apiKeySecret.name $engine.apiKeySecret.key)
  (list $names.variables.redisUsername (empty $redis.usernameKey | ternary "" $redis.name) $redis.usernameKey)
  (list $names.variables.redisPassword (eq $redis.passwordAs "env" | ternary $redis.name "") $redis.passwordKey)
  (list "AWS_ACCESS_KEY_ID" $s3.name $s3.accessKeyIdKey)
  (list "AWS_SECRET_ACCESS_KEY" $s3.name $s3.secretAccessKeyKey) }}
{{- $variable := dict "name" (index . 0) "secret" (index . 1) "key" (index . 2) }}
{{- with include "spillway.secretVariable" $variable }}{{- . | nindent 0 }}{{- end }}
{{- end }}
{{- with $engine.extraEnvVars }}
{{ toYaml . }}
{{- end }}{{- end -}}

{{/* (item, kind) -> what an engine requests or is limited to. */}}
{{- define "spillway.engineResources" -}}
{{- with get .item.engine.cpu .kind }}
cpu: {{ . | quote }}{{ end }}
memory: {{ include "spillway.quantity" .item.memory.memoryLimitBytes }}
{{- if .item.accelerator.needsCount }}
{{ .item.accelerator.resourceName | quote }}: {{ .item.accelerator.count }}{{ end }}
{{- with .item.engine.accelerator.memoryMiB }}
{{ print $.item.accelerator.resourceName "-memory" | quote }}: {{ int64 . }}{{ end }}
{{- with .item.engine.hugePages }}
{{- if .amount }}
{{- $at := printf "%s.hugePages.amount" $.item.path }}
hugepages-{{ .pageSize }}: {{ include "spillway.sizeQuantity" (dict "value" .amount "path" $at) }}
{{- end }}{{- end }}
{{- range $name, $amount := .item.engine.accelerator.extraResources }}
{{ $name | quote }}: {{ toString $amount | quote }}{{ end }}
{{- with get .item.engine.ephemeralStorage .kind }}
{{- $at := printf "%s.ephemeralStorage" $.item.path }}
ephemeral-storage: {{ include "spillway.sizeQuantity" (dict "value" . "path" $at) }}
{{- end }}{{- end -}}

{{/* engine -> does the model or an adapter come from a hub? */}}
{{- define "spillway.usesHub" -}}
{{- $found := not (hasPrefix "/" .model.path) -}}
{{- range .lora.adapters -}}{{- $found = or $found (not (hasPrefix "/" .path)) -}}{{- end -}}
{{- if $found -}}true{{- end -}}
{{- end -}}

{{/* engine -> do adapters come from a volume of their own? */}}
{{- define "spillway.adapterVolume" -}}
{{- $isMounted := has .lora.volume.type (list "existingClaim" "hostPath" "nfs") -}}
{{- if and $isMounted (or .lora.adapters .lora.runtimeUpdating) -}}true{{- end -}}
{{- end -}}

{{/* item -> is there a folder for the shared tier in the pod? */}}
{{- define "spillway.usesNvme" -}}
{{- $tier := .engine.offload.sharedTier -}}
{{- if and .engine.offload.enabled (has "nvme" (list $tier.type $tier.below.type)) -}}true{{- end -}}
{{- end -}}

{{/* item -> the node's folder of the CPU tier that its engines share; empty: they share none. */}}
{{- define "spillway.nodeFolder" -}}
{{- with .engine.offload -}}{{- if and .enabled .nodeTier.enabled -}}{{ .nodeTier.hostPath }}{{- end -}}{{- end -}}
{{- end -}}

{{/* item -> the size of the shared tier's volume. */}}
{{- define "spillway.nvmeSize" -}}
{{- $at := printf "%s.offload.sharedTier.nvme.volume.size" .path -}}
{{- include "spillway.sizeQuantity" (dict "value" .engine.offload.sharedTier.nvme.volume.size "path" $at) -}}
{{- end -}}

{{/* (root, item) -> name of the claim that the chart makes for a sharedClaim. */}}
{{- define "spillway.nvmeClaim" -}}
{{- include "spillway.fit" (dict "text" (printf "%s-kv" .item.name) "max" 63) -}}
{{- end -}}

{{/* item -> folders that the values ask for, as a YAML list of name, path, volume[, readOnly]. */}}
{{- define "spillway.engineFolders" -}}
{{- $engine := .engine -}}{{- $found := list -}}{{- $model := $engine.model.volume -}}
{{- if and (hasPrefix "/" $engine.model.path) (has $model.type (list "existingClaim" "hostPath" "nfs")) -}}
{{- $found = append $found (dict "name" "model" "path" $model.mountPath "volume" $model "readOnly" true) -}}
{{- end -}}
{{- if include "spillway.usesHub" $engine -}}
{{- $cache := deepCopy $engine.model.cache -}}
{{- with $cache.sizeLimit -}}
{{- $size := dict "value" . "path" (printf "%s.model.cache.sizeLimit" $.path) -}}
{{- $_ := set $cache "sizeLimit" (include "spillway.sizeQuantity" $size) -}}{{- end -}}
{{- $found = append $found (dict "name" "hub" "path" .names.folders.hub "volume" $cache) -}}
{{- end -}}
{{- with $engine.lora.volume -}}
{{- $adapters := dict "name" "adapters" "path" .mountPath "volume" . "readOnly" true -}}
{{- if include "spillway.adapterVolume" $engine -}}{{- $found = append $found $adapters -}}{{- end -}}
{{- end -}}
{{- if include "spillway.usesNvme" . -}}
{{- $nvme := deepCopy $engine.offload.sharedTier.nvme -}}
{{- $_ := set $nvme.volume "sizeLimit" (include "spillway.nvmeSize" .) -}}
{{- if eq $nvme.volume.type "sharedClaim" -}}
{{- $_ = set $nvme.volume "type" "existingClaim" -}}
{{- $_ = set $nvme.volume "claimName" (include "spillway.nvmeClaim" (dict "item" .)) -}}
{{- end -}}
{{- $found = append $found (dict "name" "kv" "path" $nvme.path "volume" $nvme.volume) -}}
{{- end -}}
{{- with include "spillway.nodeFolder" . -}}
{{- $volume := dict "type" "hostPath" "hostPath" . -}}
{{- $found = append $found (dict "name" "node" "path" $.names.folders.node "volume" $volume) -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{/* (root, item) -> volumeMounts of the engine container. */}}
{{- define "spillway.engineMounts" -}}
{{- $engine := .item.engine -}}{{- $folders := .item.names.folders -}}
- {name: config, mountPath: {{ $folders.config }}, readOnly: true}
# vLLM's queues and the CPU tier.
- {name: shared-memory, mountPath: /dev/shm}
- {name: scratch, mountPath: /tmp, subPath: tmp}
- {name: scratch, mountPath: {{ $folders.home }}, subPath: home}
{{- range include "spillway.engineFolders" .item | fromYamlArray }}
- {name: {{ .name }}, mountPath: {{ .path | quote }}{{ if .readOnly }}, readOnly: true{{ end }}}{{ end }}
{{- if .item.secretFiles }}
- {name: secrets, mountPath: {{ $folders.secrets }}, readOnly: true}{{ end }}
{{- if $engine.hugePages.amount }}
- {name: hugepages, mountPath: {{ $engine.hugePages.mountPath | quote }}}{{ end }}
{{- range (include "spillway.driverMounts" . | fromYamlArray) }}
- {name: {{ .name }}, mountPath: {{ .path }}, readOnly: true}{{ end }}
{{- with $engine.extraVolumeMounts }}{{- toYaml . | nindent 0 }}{{- end }}
{{- end -}}

{{/* (root, item) -> the host files to mount, as a YAML list. */}}
{{- define "spillway.driverMounts" -}}
{{- $known := .root.Files.Get "files/driver-mounts.yaml" | fromYaml -}}{{- $mounts := list -}}
{{- if .item.engine.accelerator.driverMounts -}}
{{- range $known.driver -}}
{{- if or (ne .name "npu-smi") $.item.engine.accelerator.npuSmiPath -}}{{- $mounts = append $mounts . -}}{{- end -}}
{{- end -}}{{- end -}}
{{- if .item.engine.accelerator.roceMounts -}}{{- $mounts = concat $mounts $known.roce -}}{{- end -}}
{{- toYaml $mounts -}}
{{- end -}}

{{/* (root, item) -> volumes of an engine pod. */}}
{{- define "spillway.engineVolumes" -}}
{{- $engine := .item.engine -}}
- {name: config, configMap: {name: {{ .item.name }}}}
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: {{ include "spillway.quantity" .item.memory.sharedMemoryBytes }}}
- {name: scratch, emptyDir: {}}
{{- range $folder := include "spillway.engineFolders" .item | fromYamlArray }}
{{- with include "spillway.volumeSource" (merge (pick $folder "readOnly") $folder.volume) }}
- name: {{ $folder.name }}
  {{ . }}
{{- end }}{{- end }}
{{- with .item.secretFiles }}{{- include "spillway.secretsVolume" . | nindent 0 }}{{- end }}
{{- if $engine.hugePages.amount }}
- name: hugepages
  emptyDir: {medium: HugePages-{{ $engine.hugePages.pageSize }}}
{{- end }}
{{- range (include "spillway.driverMounts" . | fromYamlArray) }}
- name: {{ .name }}
  hostPath: {path: {{ eq .name "npu-smi" | ternary $engine.accelerator.npuSmiPath .path }}, type: {{ .type }}}
{{- end }}
{{- with $engine.extraVolumes }}{{- toYaml . | nindent 0 }}{{- end }}
{{- end -}}

{{/* plan -> seconds from an engine's SIGTERM to the end of its drain, the least of all groups; empty if that is 0. */}}
{{- define "spillway.engineEndSeconds" -}}
{{- $least := 0.0 -}}
{{- range $item := . -}}
{{- $own := addf $item.engine.lifecycle.drainDelaySeconds $item.engine.lifecycle.drainTimeoutSeconds -}}
{{- if or (eq $least 0.0) (lt $own $least) -}}{{- $least = $own -}}{{- end -}}
{{- end -}}
{{- if gt $least 0.0 -}}{{- $least -}}{{- end -}}
{{- end -}}

{{/* (root, item[, worker]) -> metadata and specification of an engine's pod. worker: it has ranks alone, and no server,
because the replica's first pod leads. */}}
{{- define "spillway.enginePod" -}}
{{- $item := .item -}}{{- $engine := $item.engine -}}{{- $folders := $item.names.folders -}}
{{- $tag := printf "%s-%s" .root.Chart.AppVersion $item.accelerator.imageSuffix }}
{{- with $engine.image.variant }}{{ $tag = printf "%s-%s" $tag . }}{{ end }}
{{- $vllm := toString $engine.image.vllm }}
{{- if ne $vllm "0.23" }}{{ $tag = printf "%s-vllm%s" $tag $vllm }}{{ end -}}
metadata:
  {{- $checksum := include "spillway.engineFiles" (dict "root" .root "item" $item "forHash" true) | sha256sum }}
  {{- include "spillway.podMetadata" (dict "root" .root "item" $item "section" $engine "container" "engine"
    "checksum" $checksum "labels" (dict "spillway/vllm" $vllm)) | nindent 2 }}
spec:
  {{- $of := pick $item.accelerator "schedulerName" "nodeSelector" "tolerations" }}
  {{- include "spillway.podSpec" (merge (dict "root" .root "item" $item "section" $engine "name" $item.name
    "graceSeconds" (include "spillway.engineGraceSeconds" $item)
    "context" $item.accelerator.podSecurityContext) $of) | nindent 2 }}
  containers:
    - name: engine
      {{- include "spillway.image" (dict "root" .root "section" $engine "tag" $tag) | nindent 6 }}
      {{- if eq $item.platform "npu" }}
      command: [/bin/bash, {{ $folders.config }}/start-engine.sh]
      {{- else }}
      command: [python3, -m, spillway_engine]
      {{- end }}
      {{- $place := "--set, nodeRank=$(LWS_WORKER_INDEX), --set, leader=$(LWS_LEADER_ADDRESS)" }}
      args: [--config, {{ $folders.config }}/engine.yaml, --set, name=$(POD_NAME)
        {{- if eq $item.controller "LeaderWorkerSet" }}, {{ $place }}{{ end }}]
      workingDir: {{ $folders.home }}
      env:
        {{- include "spillway.engineEnvironment" (dict "root" .root "item" $item) | nindent 8 }}
      {{- if not .worker }}
      ports:
        - {name: http, containerPort: {{ $engine.port }}}
        {{- range include "spillway.eventPorts" $engine | fromYamlArray }}
        - {name: {{ .name }}, containerPort: {{ int64 .port }}}{{ end }}
      {{- include "spillway.probes" (dict "startupSeconds" $engine.lifecycle.startupTimeoutSeconds
        "probes" $engine.probes) | nindent 6 }}{{ end }}
      {{- with include "spillway.preStop" (dict "root" .root "seconds" $engine.lifecycle.preStopSeconds) | trim }}
      {{- . | nindent 6 }}{{ end }}
      # {{ $item.memory.arithmetic }}
      resources:
        {{- range $kind := list "request" "limit" }}
        {{ $kind }}s:
          {{- include "spillway.engineResources" (dict "item" $item "kind" $kind) | nindent 10 }}
        {{- end }}
        {{- with $engine.resourceClaims }}
        claims:
          {{- range . }}
          - {name: {{ .name }}}
          {{- end }}{{- end }}
      securityContext: {{ toJson $item.accelerator.securityContext }}
      volumeMounts:
        {{- include "spillway.engineMounts" (dict "root" .root "item" $item) | nindent 8 }}
    {{- with $engine.sidecars }}{{- toYaml . | nindent 4 }}{{- end }}
  volumes:
    {{- include "spillway.engineVolumes" (dict "root" .root "item" $item) | nindent 4 }}
{{- end -}}

{{/* (root, item) -> volumeClaimTemplates for a folder of the shared tier that each pod has for itself. */}}
{{- define "spillway.engineClaims" -}}
{{- $volume := .item.engine.offload.sharedTier.nvme.volume -}}
{{- if and (include "spillway.usesNvme" .item) (eq $volume.type "perPodClaim") -}}
# A pod that moves away may leave its claim: what lies there is a cache.
persistentVolumeClaimRetentionPolicy: {whenScaled: Retain, whenDeleted: Retain}
volumeClaimTemplates:
  - metadata:
      name: kv
      labels:
        {{- include "spillway.selectorLabels" . | nindent 8 }}
    spec:
      accessModes: [ReadWriteOnce]
      {{- if not (kindIs "invalid" $volume.storageClassName) }}
      storageClassName: {{ $volume.storageClassName | quote }}{{ end }}
      resources:
        requests: {storage: {{ include "spillway.nvmeSize" .item }}}
{{- end -}}{{- end -}}

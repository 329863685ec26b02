{{/* What Ascend needs of a pod beyond its devices: collective communication (HCCL), CPUs to bind, huge pages. */}}

{{/* hccl -> YAML of its environment. */}}
{{- define "spillway.hcclEnvironment" -}}
{{- $known := dict "basePort" "HCCL_IF_BASE_PORT" "devicePorts" "HCCL_NPU_SOCKET_PORT_RANGE" "connectTimeoutSeconds" "HCCL_CONNECT_TIMEOUT" "executeTimeoutSeconds" "HCCL_EXEC_TIMEOUT" "bufferMiB" "HCCL_BUFFSIZE" -}}
{{- $environment := dict -}}
{{- range $key, $name := $known -}}
{{- $value := get $ $key -}}
{{- if $value -}}{{- $_ := set $environment $name (ternary $value (toString (int64 $value)) (kindIs "string" $value)) -}}{{- end -}}
{{- end -}}
{{- toYaml $environment -}}
{{- end -}}

{{/* item -> on, off, or nothing: whether vllm-ascend binds CPUs; nothing: it decides. auto with a limit that cannot hold
the binding is off, as vllm-ascend would give it up after the start, with a warning. */}}
{{- define "spillway.cpuBinding" -}}
{{- $engine := .engine -}}
{{- if eq .platform "npu" -}}
{{- $given := include "spillway.onOff" $engine.accelerator.cpuBinding -}}
{{- if ne $given "auto" -}}{{ $given }}
{{- else if $engine.cpu.limit -}}
{{- if lt (include "spillway.milliCores" $engine.cpu.limit | float64) (mulf 1000 .accelerator.cpusPerDevice .accelerator.count) -}}off{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* item -> first and last of the host's ports that HCCL takes, as a YAML list; empty where one rank talks to none. */}}
{{- define "spillway.hcclPorts" -}}
{{- $first := int64 (default 60000 .engine.accelerator.hccl.basePort) -}}
{{- if and (eq .platform "npu") (gt (include "spillway.ranks" .engine | int64) 1) -}}{{ toYaml (list $first (add $first 31)) }}{{- else -}}[]{{- end -}}
{{- end -}}

{{/* (root, engines, problems) */}}
{{- define "spillway.ascendChecks" -}}
{{- $texts := list -}}
{{- $onHost := list -}}
{{- $variable := "VLLM_ASCEND_ENABLE_BATCH_MEMCPY" -}}
{{- range $item := .engines -}}
{{- $engine := $item.engine -}}{{- $path := $item.path -}}{{- $accelerator := $engine.accelerator -}}
{{- $ports := dict "port" (int64 $engine.port) -}}
{{- range include "spillway.eventPorts" $engine | fromYamlArray -}}
{{- $key := printf "kvEvents.%s" (regexMatch "^kv-events" .name | ternary "port" "replayPort") -}}
{{- $rank := regexFind "[0-9]+$" .name -}}
{{- $_ := set $ports (eq $rank "" | ternary $key (printf "%s + %s" $key $rank)) (int64 .port) -}}
{{- end -}}
{{- $hccl := include "spillway.hcclPorts" $item | fromYamlArray -}}
{{- if $hccl -}}
{{- $first := index $hccl 0 | int64 -}}{{- $last := index $hccl 1 | int64 -}}
{{- range $key, $port := $ports -}}
{{- if and (ge $port $first) (le $port $last) -}}
{{- $texts = append $texts (printf "%s.%s: %d lies among the ports %d to %d that HCCL opens (accelerator.hccl.basePort); choose one outside, or move basePort" $path $key $port $first $last) -}}
{{- end -}}
{{- end -}}
{{- if $engine.hostNetwork -}}
{{- range $other := $onHost -}}
{{- /* Pods with a port in common never share a node. */ -}}
{{- $common := false -}}
{{- range $port := values $ports -}}{{- if has $port (values $other.ports) -}}{{- $common = true -}}{{- end -}}{{- end -}}
{{- if and (not $common) (le $first (int64 $other.last)) (ge $last (int64 $other.first)) (eq (toJson $engine.nodeSelector) $other.nodes) -}}
{{- $texts = append $texts (printf "%s.accelerator.hccl.basePort: HCCL's ports %d to %d overlap those of %s (%d to %d), and hostNetwork: true brings both onto one node; set basePort 32 or more apart, or keep the two on different nodes by nodeSelector" $path $first $last $other.path (int64 $other.first) (int64 $other.last)) -}}
{{- end -}}
{{- end -}}
{{- $onHost = append $onHost (dict "path" $path "ports" $ports "first" $first "last" $last "nodes" (toJson $engine.nodeSelector)) -}}
{{- end -}}
{{- end -}}
{{- with $accelerator.hccl.devicePorts -}}
{{- $ends := splitList "-" . -}}
{{- $least := index $ends 0 | int64 -}}{{- $most := index $ends 1 | int64 -}}
{{- if or (gt $least $most) (gt $most 65535) (lt $least 1024) -}}
{{- $texts = append $texts (printf "%s.accelerator.hccl.devicePorts: %q is no range within 1024 to 65535, lower end first; write 16666-16697, for example" $path .) -}}
{{- end -}}
{{- end -}}
{{- range $name, $_ := include "spillway.hcclEnvironment" $accelerator.hccl | fromYaml -}}
{{- $isGiven := hasKey (default dict $engine.extraEnv) $name -}}
{{- range $engine.extraEnvVars -}}{{- if eq .name $name -}}{{- $isGiven = true -}}{{- end -}}{{- end -}}
{{- if $isGiven -}}{{- $texts = append $texts (printf "%s.accelerator.hccl sets %s, and the environment of %s does too; give it once" $path $name $path) -}}{{- end -}}
{{- end -}}
{{- $named := keys (default dict $engine.extraEnv) -}}
{{- range $engine.extraEnvVars -}}{{- $named = append $named .name -}}{{- end -}}
{{- if has $variable $named -}}
{{- $texts = append $texts (printf "%s.extraEnv: %s is read when vllm-ascend is built and does nothing here; remove it, and set %s.offload.batchMemcpy: auto, on or off" $path $variable $path) -}}
{{- end -}}
{{- if eq $item.platform "npu" -}}
{{- if eq (include "spillway.onOff" $accelerator.cpuBinding) "on" -}}
{{- $needed := mul (int64 $item.accelerator.cpusPerDevice) (int64 $item.accelerator.count) -}}
{{- $cores := include "spillway.milliCores" (default "0" $engine.cpu.limit) | float64 -}}
{{- $requested := include "spillway.milliCores" (default (default "0" $engine.cpu.limit) $engine.cpu.request) | float64 -}}
{{- if or (lt $cores (float64 (mul 1000 $needed))) (ne $cores $requested) (ne $cores (mulf 1000 (floor (divf $cores 1000)))) -}}
{{- $texts = append $texts (printf "%s.cpu: request %v and limit %v given, but accelerator.cpuBinding: on needs %d whole CPUs or more (%d for each of %d devices), request and limit alike, which the static CPU manager then reserves; set both to %q, or cpuBinding: auto" $path (default "null" $engine.cpu.request) (default "null" $engine.cpu.limit) $needed (int64 $item.accelerator.cpusPerDevice) (int64 $item.accelerator.count) (toString $needed)) -}}
{{- end -}}
{{- if and $accelerator.driverMounts (not $accelerator.npuSmiPath) -}}
{{- $texts = append $texts (printf "%s.accelerator.npuSmiPath is empty, and cpuBinding: on asks npu-smi for the location of each device; set its path on the node, or cpuBinding: off" $path) -}}
{{- end -}}
{{- end -}}
{{- $bindsBySetting := include "spillway.cpuBinding" $item -}}
{{- range $engine.extraArgs -}}
{{- if and (regexMatch "^--additional[-_]config" .) (ne (include "spillway.onOff" $accelerator.cpuBinding) "auto") -}}
{{- $texts = append $texts (printf "%s.accelerator.cpuBinding: %s is given to vLLM as --additional-config, which extraArgs has too, and vLLM takes the last one; write \"enable_cpu_binding\": %v there, and set cpuBinding: auto" $path $bindsBySetting (eq $bindsBySetting "on")) -}}
{{- end -}}
{{- end -}}
{{- $isOwnImage := or $engine.image.tag $engine.image.digest -}}
{{- $isA5Image := hasPrefix "a5" $engine.image.variant -}}
{{- if and (eq $accelerator.preset "a5") (not $isA5Image) (not $isOwnImage) -}}
{{- $texts = append $texts (printf "%s.image.variant: %q is an image of another board than preset: a5; set a5 or a5-openeuler" $path $engine.image.variant) -}}
{{- end -}}
{{- if and $isA5Image (ne $accelerator.preset "a5") (not $isOwnImage) -}}
{{- $texts = append $texts (printf "%s.image.variant: %q is an image of Atlas A5, and accelerator.preset: %s is for other boards; set preset: a5 and resourceName" $path $engine.image.variant $accelerator.preset) -}}
{{- end -}}
{{- end -}}
{{- if and $accelerator.memoryMiB $item.accelerator.resourceName -}}
{{- $resource := printf "%s-memory" $item.accelerator.resourceName -}}
{{- if hasKey $accelerator.extraResources $resource -}}
{{- $texts = append $texts (printf "%s.accelerator.extraResources: %s is what memoryMiB: %d asks for; remove one of the two" $path $resource (int64 $accelerator.memoryMiB)) -}}
{{- end -}}
{{- end -}}
{{- with $engine.hugePages.amount -}}
{{- $amount := int64 (include "spillway.bytes" (dict "value" . "path" (printf "%s.hugePages.amount" $path))) -}}
{{- $page := int64 (include "spillway.bytes" (dict "value" $engine.hugePages.pageSize "path" (printf "%s.hugePages.pageSize" $path))) -}}
{{- if mod $amount $page -}}
{{- $texts = append $texts (printf "%s.hugePages.amount: %v is no whole number of pages of %s; set it to %s" $path . $engine.hugePages.pageSize (include "spillway.quantity" (mul (div (add $amount (sub $page 1)) $page) $page))) -}}
{{- end -}}
{{- $resource := printf "hugepages-%s" $engine.hugePages.pageSize -}}
{{- if hasKey $accelerator.extraResources $resource -}}
{{- $texts = append $texts (printf "%s.accelerator.extraResources: %s is what hugePages.amount: %v asks for; remove one of the two" $path $resource .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $texts -}}{{- include "spillway.problem" (dict "problems" $.problems "text" .) -}}{{- end -}}
{{- end -}}

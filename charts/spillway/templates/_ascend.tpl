{{/* What Ascend needs of a pod beyond its devices: collective communication (HCCL), CPUs to bind, huge pages. */}}

{{/* hccl -> YAML of its environment. */}}
{{- define "spillway.hcclEnvironment" -}}
{{- $known := dict "basePort" "HCCL_IF_BASE_PORT" "devicePorts" "HCCL_NPU_SOCKET_PORT_RANGE"
  "connectTimeoutSeconds" "HCCL_CONNECT_TIMEOUT" "executeTimeoutSeconds" "HCCL_EXEC_TIMEOUT"
  "bufferMiB" "HCCL_BUFFSIZE" -}}
{{- $environment := dict -}}
{{- range $key, $name := $known -}}
{{- $value := get $ $key -}}
{{- if $value -}}
{{- $_ := set $environment $name (ternary $value (toString (int64 $value)) (kindIs "string" $value)) -}}
{{- end -}}{{- end -}}
{{- toYaml $environment -}}
{{- end -}}

{{/* item -> on, off, or nothing: whether vllm-ascend binds CPUs; nothing: it decides. auto with a limit that cannot
hold the binding is off, as vllm-ascend would give it up after the start, with a warning. */}}
{{- define "spillway.cpuBinding" -}}
{{- $engine := .engine -}}
{{- if eq .platform "npu" -}}
{{- $given := include "spillway.onOff" $engine.accelerator.cpuBinding -}}
{{- if ne $given "auto" -}}{{ $given }}
{{- else if $engine.cpu.limit -}}
{{- $needed := mulf 1000 .accelerator.cpusPerDevice .accelerator.count -}}
{{- if lt (include "spillway.milliCores" $engine.cpu.limit | float64) $needed -}}off{{- end -}}
{{- end -}}{{- end -}}{{- end -}}

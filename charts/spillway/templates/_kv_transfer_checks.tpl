{{/* Another KV connector beside Spillway's: which can be one, and what is not proven beside it. Names that vLLM gives. */}}

{{/* (root, item, problems) */}}
{{- define "spillway.kvTransferChecks" -}}
{{- $path := .item.path -}}{{- $transfer := .item.engine.kvTransfer -}}{{- $offload := .item.engine.offload -}}
{{- $texts := list -}}
{{- $names := .root.Files.Get "files/vllm-names.yaml" | fromYaml -}}
{{- if and $transfer.connector (not $transfer.modulePath) -}}
{{- range splitList " " $names.connectors -}}
{{- if and (eq (lower .) (lower $transfer.connector)) (ne . $transfer.connector) -}}
{{- $texts = append $texts (printf "%s.kvTransfer.connector: %s is not how vLLM writes it; did you mean %s?" $path $transfer.connector .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $image := .item.engine.image -}}
{{- with .item.engine.model.quantization -}}
{{- if not (or (has . (splitList " " $names.quantization)) $image.tag $image.digest (ne $image.repository "spillway-engine")) -}}
{{- $texts = append $texts (printf "%s.model.quantization: %s is no method of vLLM; write one of %s" $path . (splitList " " $names.quantization | join ", ")) -}}
{{- end -}}
{{- end -}}
{{- if has $transfer.connector (list "SpillwayConnector" "OffloadingConnector" "SimpleCPUOffloadConnector" "MultiConnector") -}}
{{- $texts = append $texts (printf "%s.kvTransfer.connector: %s is no second connector: Spillway's own is there with offload.enabled: true and combines the two itself; name the other one, or remove kvTransfer" $path $transfer.connector) -}}
{{- end -}}
{{- if $transfer.connector -}}
{{- range list "layerwiseLoads" "computeWhileLoading" -}}
{{- if eq (include "spillway.onOff" (index $offload .)) "on" -}}
{{- $texts = append $texts (printf "%s.offload.%s: on is not proven beside kvTransfer.connector: %s; set it to \"off\"" $path . $transfer.connector) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $key, $value := $transfer.extraConfig -}}
{{- if and (kindIs "string" $value) (regexMatch "(?i)(password|secret|credential|api_?key)" $key) (not (regexMatch "_(env|file)$" $key)) -}}
{{- $texts = append $texts (printf "%s.kvTransfer.extraConfig.%s would lie in a ConfigMap in plain text; give that connector its secret by a variable (extraEnvVars) or a file (extraVolumes)" $path $key) -}}
{{- end -}}
{{- end -}}
{{- range $texts -}}{{- include "spillway.problem" (dict "problems" $.problems "text" .) -}}{{- end -}}
{{- end -}}

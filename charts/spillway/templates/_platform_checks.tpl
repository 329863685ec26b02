{{/* Settings that mean something on one platform alone. */}}

{{/* (item, problems) */}}
{{- define "spillway.platformChecks" -}}
{{- $item := .item -}}{{- $engine := $item.engine -}}{{- $path := $item.path -}}{{- $offload := $engine.offload -}}
{{- $texts := list -}}
{{- if eq $item.platform "cuda" -}}
{{- if or $engine.accelerator.driverMounts $engine.accelerator.roceMounts $engine.accelerator.visibleDevices.mode -}}
{{- $texts = append $texts (printf "%s.accelerator: driverMounts, roceMounts and visibleDevices are of Ascend and mean nothing with preset: cuda, whose container runtime brings driver and devices; remove them" $path) -}}
{{- end -}}
{{- if $engine.image.variant -}}
{{- $texts = append $texts (printf "%s.image.variant: %q is an Ascend image; preset: cuda has no variants" $path $engine.image.variant) -}}
{{- end -}}
{{- if $offload.aclLibraryPath -}}
{{- $texts = append $texts (printf "%s.offload.aclLibraryPath: %s is a library of Ascend's CANN, which preset: cuda does not open; remove it" $path $offload.aclLibraryPath) -}}
{{- end -}}
{{- if eq $offload.transport "npu" -}}
{{- $texts = append $texts (printf "%s.offload.transport: npu copies from Ascend devices; accelerator.preset: cuda needs auto or cuda" $path) -}}
{{- end -}}
{{- else if eq $offload.transport "cuda" -}}
{{- $texts = append $texts (printf "%s.offload.transport: cuda copies from NVIDIA devices; accelerator.preset: %s needs auto" $path $engine.accelerator.preset) -}}
{{- end -}}
{{- range $texts -}}{{- include "spillway.problem" (dict "problems" $.problems "text" .) -}}{{- end -}}
{{- end -}}

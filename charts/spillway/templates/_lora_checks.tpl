{{/* LoRA adapters: where each comes from, and what contradicts. Names that are served twice: spillway.releaseChecks. */}}

{{/* (item, problems) */}}
{{- define "spillway.loraChecks" -}}
{{- $engine := .item.engine -}}{{- $lora := $engine.lora -}}{{- $path := printf "%s.lora" .item.path -}}
{{- $texts := list -}}
{{- $volume := $lora.volume -}}
{{- $folders := list -}}
{{- range $index, $adapter := $lora.adapters -}}
{{- if and (hasPrefix "/" $adapter.path) (regexMatch "(/\\.\\.?(/|$)|\\s$)" $adapter.path) -}}
{{- $texts = append $texts (printf "%s.adapters[%d].path: %q given, an absolute folder without .. in it and without a blank at its end needed; correct it" $path $index $adapter.path) -}}
{{- end -}}
{{- if hasPrefix "/" $adapter.path -}}
{{- $folders = append $folders $adapter.path -}}
{{- $root := "" -}}
{{- if has $volume.type (list "existingClaim" "hostPath" "nfs") -}}{{- $root = $volume.mountPath -}}{{- end -}}
{{- if eq $volume.type "modelVolume" -}}{{- $root = $engine.model.volume.mountPath -}}{{- end -}}
{{- if and $root (not (hasPrefix (printf "%s/" (trimSuffix "/" $root)) $adapter.path)) -}}
{{- $texts = append $texts (printf "%s.adapters[%d].path: %s does not lie below %s, where lora.volume.type: %s appears; correct one of the two" $path $index $adapter.path $root $volume.type) -}}
{{- end -}}
{{- else if not (regexMatch "^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$" $adapter.path) -}}
{{- $texts = append $texts (printf "%s.adapters[%d].path: %q is neither an absolute folder nor a hub name; write /adapters/name or owner/adapter, for example" $path $index $adapter.path) -}}
{{- end -}}
{{- end -}}
{{- if not $lora.runtimeUpdating -}}
{{- $names := list -}}{{- range $lora.adapters -}}{{- $names = append $names .name -}}{{- end -}}
{{- range $index, $alias := $lora.aliases -}}
{{- if not (has $alias.adapter $names) -}}
{{- $texts = append $texts (printf "%s.aliases[%d].adapter: %q is none of lora.adapters (%s), and none comes later without runtimeUpdating: true; correct it, or add the adapter" $path $index $alias.adapter (default "none" (join ", " $names))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $folders (eq $volume.type "none") -}}
{{- $texts = append $texts (printf "%s.adapters: %s is a folder, but no volume brings it; set lora.volume.type to existingClaim, hostPath or nfs, to modelVolume when it lies in the model's, or to image" $path (first $folders)) -}}
{{- end -}}
{{- if and (ne $volume.type "none") (not $folders) (not $lora.runtimeUpdating) -}}
{{- $texts = append $texts (printf "%s.volume.type: %s, but no adapter has a path in it; name one in lora.adapters, set runtimeUpdating: true, or type: none" $path $volume.type) -}}
{{- end -}}
{{- with $lora.resolverFolder -}}
{{- if not $lora.runtimeUpdating -}}
{{- $texts = append $texts (printf "%s.resolverFolder: vLLM loads adapters by name only where they may change at run time; set lora.runtimeUpdating: true" $path) -}}
{{- end -}}
{{- if not $lora.resolverNames -}}
{{- $texts = append $texts (printf "%s.resolverNames: empty, so no request would load an adapter; write [\"*\"] for every name, or set resolverFolder: \"\"" $path) -}}
{{- end -}}
{{- $root := "" -}}
{{- if has $volume.type (list "existingClaim" "hostPath" "nfs") -}}{{- $root = $volume.mountPath -}}{{- end -}}
{{- if eq $volume.type "modelVolume" -}}{{- $root = $engine.model.volume.mountPath -}}{{- end -}}
{{- if eq $volume.type "none" -}}
{{- $texts = append $texts (printf "%s.resolverFolder: %s, but no volume brings it; set lora.volume.type to existingClaim, hostPath or nfs, to modelVolume when it lies in the model's, or to image" $path .) -}}
{{- else if and $root (not (hasPrefix (printf "%s/" (trimSuffix "/" $root)) (printf "%s/" .))) -}}
{{- $texts = append $texts (printf "%s.resolverFolder: %s does not lie in %s, where lora.volume.type: %s appears; correct one of the two" $path . $root $volume.type) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $volume.type "modelVolume") (not (has $engine.model.volume.type (list "existingClaim" "hostPath" "nfs"))) -}}
{{- $texts = append $texts (printf "%s.volume.type: modelVolume needs model.volume.type existingClaim, hostPath or nfs; it is %s" $path $engine.model.volume.type) -}}
{{- end -}}
{{- range $need := list (list "existingClaim" "claimName") (list "hostPath" "hostPath") -}}
{{- if and (eq $volume.type (index $need 0)) (not (get $volume (index $need 1))) -}}
{{- $texts = append $texts (printf "%s.volume.%s is empty; type: %s needs it" $path (index $need 1) (index $need 0)) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $volume.type "nfs") (not (and $volume.nfs.server $volume.nfs.path)) -}}
{{- $texts = append $texts (printf "%s.volume.nfs: type: nfs needs server and path; set both" $path) -}}
{{- end -}}
{{- if and $lora.maxInMemory (lt (int64 $lora.maxInMemory) (int64 $lora.maxActive)) -}}
{{- $texts = append $texts (printf "%s.maxInMemory: %d is less than maxActive: %d, whose adapters are in memory too; raise it, or set null" $path (int64 $lora.maxInMemory) (int64 $lora.maxActive)) -}}
{{- end -}}
{{- range $texts -}}{{- include "spillway.problem" (dict "problems" $.problems "text" .) -}}{{- end -}}
{{- end -}}

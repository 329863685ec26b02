{{/* Reading values: laying maps over each other, whole numbers, sizes, words that YAML takes for booleans. */}}

{{/* (base, over): changes base. Keys of `over` win, maps are merged, null removes. */}}
{{- define "spillway.overlay" -}}
{{- range $key, $value := .over -}}
{{- if kindIs "invalid" $value -}}{{- $_ := unset $.base $key -}}
{{- else if and (kindIs "map" $value) (kindIs "map" (get $.base $key)) -}}
{{- include "spillway.overlay" (dict "base" (get $.base $key) "over" $value) -}}
{{- else -}}{{- $_ := set $.base $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* map: changes it. Helm reads every number as a float and would write 200000000 as 2e+08, which YAML readers take
for a float again. */}}
{{- define "spillway.wholeNumbers" -}}
{{- $map := . -}}
{{- range $key, $value := $map -}}
{{- if kindIs "map" $value -}}{{- include "spillway.wholeNumbers" $value -}}
{{- else if kindIs "float64" $value -}}
{{- if eq $value (float64 (int64 $value)) -}}{{- $_ := set $map $key (int64 $value) -}}{{- end -}}
{{- else if kindIs "slice" $value -}}
{{- range $value -}}{{- if kindIs "map" . -}}{{- include "spillway.wholeNumbers" . -}}{{- end -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* true and false, which YAML 1.1 makes of a bare on and off -> "on" and "off". */}}
{{- define "spillway.onOff" -}}
{{- if kindIs "bool" . -}}{{ ternary "on" "off" . }}{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{/* value -> its bytes as decimal text; nothing where it is no size. A Kubernetes quantity of whole bytes (64G, 16Gi, 12e9)
or a size with the unit spelt out (512MiB, 1TB). tests/chart/test_template_arithmetic.py ties it to Python. */}}
{{- define "spillway.parsedBytes" -}}
{{- if or (kindIs "float64" .) (kindIs "int64" .) (kindIs "int" .) -}}
{{- if ge (float64 .) 0.0 -}}{{ int64 . }}{{- end -}}
{{- else -}}
{{- $text := toString . | trim -}}
{{- $number := regexFind "^[0-9]+(\\.[0-9]+)?([eE][0-9]{1,2}$)?" $text -}}
{{- $unit := trimPrefix $number $text | trim -}}
{{- /* One letter is Kubernetes' own and in its case: m would be thousandths, K is no unit there. */ -}}
{{- if ne (len $unit) 1 -}}{{- $unit = upper $unit -}}{{- end -}}
{{- $units := dict "" "1" "B" "1" "k" "1e3" "M" "1e6" "G" "1e9" "T" "1e12" "P" "1e15" "E" "1e18" "KB" "1e3" "MB" "1e6" "GB" "1e9" "TB" "1e12" "PB" "1e15" "EB" "1e18" "KI" "1024" "MI" "1048576" "GI" "1073741824" "TI" "1099511627776" "PI" "1125899906842624" "EI" "1152921504606846976" "KIB" "1024" "MIB" "1048576" "GIB" "1073741824" "TIB" "1099511627776" "PIB" "1125899906842624" "EIB" "1152921504606846976" -}}
{{- if and $number (hasKey $units $unit) -}}
{{- $bytes := mulf (float64 $number) (float64 (get $units $unit)) -}}
{{- if lt $bytes 9.2e18 -}}{{ int64 (floor $bytes) }}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (value, path) -> bytes as decimal text. What is no size fails the render by name, wherever it is read. */}}
{{- define "spillway.bytes" -}}
{{- $bytes := include "spillway.parsedBytes" .value -}}
{{- if not $bytes -}}{{- fail (include "spillway.noSize" .) -}}{{- end -}}
{{- $bytes -}}
{{- end -}}

{{/* (value, path) -> the message for what is no size. */}}
{{- define "spillway.noSize" -}}
{{- printf "%s: %q is no size; write for example 512MiB, 64Gi, 1TB or a number of bytes" .path (toString .value) -}}
{{- end -}}

{{/* (root, groups, problems): every size among the values. Read before anything is computed from them, so that one that
cannot be read is reported alone, not with the contradictions that 0 bytes would make. */}}
{{- define "spillway.sizeChecks" -}}
{{- $sizes := dict -}}
{{- range $key, $engine := .groups -}}
{{- $path := ternary (printf "engines.%s" $key) "engine" (ne $key "") -}}
{{- $tier := $engine.offload.sharedTier -}}
{{- $own := dict
  "model.shape.weightBytes" $engine.model.shape.weightBytes
  "model.cache.sizeLimit" $engine.model.cache.sizeLimit
  "memory.limit" $engine.memory.limit
  "memory.sharedMemory" $engine.memory.sharedMemory
  "memory.processPerRank" $engine.memory.processPerRank
  "memory.pageCache" $engine.memory.pageCache
  "offload.cpuBytes" $engine.offload.cpuBytes
  "offload.sharedTier.loadQueueBytesMax" $tier.loadQueueBytesMax
  "offload.sharedTier.storeQueueBytesMax" $tier.storeQueueBytesMax
  "offload.sharedTier.nvme.maxBytes" $tier.nvme.maxBytes
  "offload.sharedTier.nvme.tenantMaxBytes" $tier.nvme.tenantMaxBytes
  "offload.sharedTier.nvme.volume.size" $tier.nvme.volume.size
  "offload.sharedTier.redis.tenantMaxBytes" $tier.redis.tenantMaxBytes
-}}
{{- range $name, $value := $own -}}{{- $_ := set $sizes (printf "%s.%s" $path $name) $value -}}{{- end -}}
{{- end -}}
{{- $gateway := .root.Values.gateway -}}
{{- $_ := set $sizes "redis.memory" .root.Values.redis.memory -}}
{{- range $kind := list "requests" "limits" -}}{{- $_ := set $sizes (printf "gateway.resources.%s.memory" $kind) (index (default dict (get $gateway.resources $kind)) "memory") -}}{{- end -}}
{{- range $setting := include "spillway.gatewaySizes" . | fromYamlArray -}}
{{- $_ := set $sizes (printf "gateway.%s" $setting) (index (get $gateway (splitList "." $setting | first)) (splitList "." $setting | last)) -}}
{{- end -}}
{{- $problems := .problems -}}
{{- range $path, $value := $sizes -}}
{{- if and (not (kindIs "invalid" $value)) (not (include "spillway.parsedBytes" $value)) -}}
{{- include "spillway.problem" (dict "problems" $problems "text" (include "spillway.noSize" (dict "path" $path "value" $value))) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* bytes -> the shortest honest form: 31.3 GiB. */}}
{{- define "spillway.bytesText" -}}
{{- $bytes := int64 . -}}
{{- if ge $bytes 1099511627776 -}}{{ printf "%.1f TiB" (divf $bytes 1099511627776) }}
{{- else if ge $bytes 1073741824 -}}{{ printf "%.1f GiB" (divf $bytes 1073741824) }}
{{- else if ge $bytes 1048576 -}}{{ printf "%.1f MiB" (divf $bytes 1048576) }}
{{- else -}}{{ $bytes }} B
{{- end -}}
{{- end -}}

{{/* bytes -> a Kubernetes quantity, rounded up to a MiB. */}}
{{- define "spillway.quantity" -}}
{{ div (add (int64 .) 1048575) 1048576 }}Mi
{{- end -}}

{{/* (resources, path) -> a container's resources; memory as people write sizes. */}}
{{- define "spillway.resources" -}}
{{- range $kind := list "requests" "limits" }}
{{- $given := get $.resources $kind }}
{{ $kind }}:
  {{- with $given.cpu }}
  cpu: {{ . | quote }}
  {{- end }}
  {{- with $given.memory }}
  memory: {{ include "spillway.quantity" (include "spillway.bytes" (dict "value" . "path" (printf "%s.%s.memory" $.path $kind))) }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* url -> the same without user, password and secrets among its parameters, for messages: they end up in logs. */}}
{{- define "spillway.shownUrl" -}}
{{- regexReplaceAll "(?i)((password|token|secret|key)=)[^&]*" (regexReplaceAll "^([A-Za-z0-9+.-]*:?/*).*@" . "${1}***@") "${1}***" -}}
{{- end -}}

{{/* (path, value, problems): every reference to a Secret below a value, found by its key's name, holds the name of a Secret.
A credential that was pasted there would lie in the objects for all to read, so it is refused and not repeated. */}}
{{- define "spillway.secretReferenceChecks" -}}
{{- $path := .path -}}{{- $problems := .problems -}}
{{- range $key, $value := .value -}}
{{- $at := ternary (toString $key) (printf "%s.%s" $path $key) (eq $path "") -}}
{{- $isReference := regexMatch "([sS]ecret|secretKeyRef|secretRef)$" (toString $key) -}}
{{- if kindIs "map" $value -}}
{{- if and $isReference (hasKey $value "name") -}}
{{- include "spillway.secretNameCheck" (dict "path" (printf "%s.name" $at) "name" $value.name "problems" $problems) -}}
{{- end -}}
{{- include "spillway.secretReferenceChecks" (dict "path" $at "value" $value "problems" $problems) -}}
{{- else if kindIs "slice" $value -}}
{{- range $index, $entry := $value -}}
{{- if kindIs "map" $entry -}}
{{- if eq $key "pullSecrets" -}}{{- include "spillway.secretNameCheck" (dict "path" (printf "%s[%d].name" $at $index) "name" $entry.name "problems" $problems) -}}{{- end -}}
{{- include "spillway.secretReferenceChecks" (dict "path" (printf "%s[%d]" $at $index) "value" $entry "problems" $problems) -}}
{{- end -}}
{{- end -}}
{{- else if and (kindIs "string" $value) (or $isReference (regexMatch "[sS]ecretName$" (toString $key))) -}}
{{- include "spillway.secretNameCheck" (dict "path" $at "name" $value "problems" $problems) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (path, name, problems) */}}
{{- define "spillway.secretNameCheck" -}}
{{- $name := toString (default "" .name) -}}
{{- if and $name (or (gt (len $name) 253) (not (regexMatch "^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$" $name))) -}}
{{- include "spillway.problem" (dict "problems" .problems "text" (printf "%s: what is given (%d characters) is no name of a Secret: small letters, digits, dashes and dots; a credential goes into a Secret (kubectl create secret generic NAME --from-literal=KEY=...), and the name of that Secret goes here" .path (len $name))) -}}
{{- end -}}
{{- end -}}

{{/* (problems, text): collects problems, so that all are reported at once. */}}
{{- define "spillway.problem" -}}
{{- $_ := set .problems (printf "%03d" (len .problems)) .text -}}
{{- end -}}

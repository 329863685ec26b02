{{/* Sizes and quantities, as people write them and as Kubernetes takes them. */}}

{{/* (value, path) -> bytes as decimal text. A number, a Kubernetes quantity (64G, 16Gi, 12e9) or a size with its unit
spelt out (512MiB, 1TB); a fraction of a byte is rounded up. One letter is in Kubernetes' own case, two and more are in
any. spillway_settings.byte_sizes reads the same sizes, and says what is wrong with others. */}}
{{- define "spillway.bytes" -}}
{{- $form := "^ *[+]?([0-9]{1,40}[.]?[0-9]{0,40}|[.][0-9]{1,40})([eE][-+]?[0-9]{1,2}| *[A-Za-z]+|) *$" -}}
{{- $text := toString .value -}}{{- $unit := "" -}}{{- $number := .value -}}
{{- if kindIs "string" .value -}}
{{- $number = regexReplaceAll $form $text "${1}" -}}{{- $unit = regexReplaceAll $form $text "${2}" | trim -}}
{{- if regexMatch "[0-9]" $unit -}}{{- $number = print $number $unit -}}{{- $unit = "" -}}{{- end -}}
{{- if gt (len $unit) 1 -}}{{- $unit = upper $unit | trimSuffix "B" | printf "%sB" -}}{{- end -}}
{{- end -}}
{{- $factor := get (dict "" 1 "B" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "KB" 1e3 "MB" 1e6 "GB" 1e9
  "TB" 1e12 "PB" 1e15 "EB" 1e18 "KIB" 1024 "MIB" 1048576 "GIB" 1073741824 "TIB" 1099511627776
  "PIB" 1125899906842624 "EIB" 1152921504606846976) $unit -}}
{{- $bytes := mulf (float64 $number) (float64 $factor) -}}
{{- if or (not $factor) (and (kindIs "string" .value) (not (regexMatch $form $text))) (lt $bytes 0.0)
  (gt $bytes 9007199254740992.0) -}}
{{- include "spillway.rule.size" . -}}
{{- end -}}
{{- ceil $bytes | int64 -}}
{{- end -}}

{{/* root -> bytes of redis.memory that hold KV blocks: three quarters. */}}
{{- define "spillway.redisBlockBytes" -}}
{{- div (mul (int64 (include "spillway.bytes" (dict "value" .Values.redis.memory "path" "redis.memory"))) 3) 4 -}}
{{- end -}}

{{/* bytes -> the shortest honest form: 31.3 GiB. */}}
{{- define "spillway.bytesText" -}}
{{- $bytes := int64 . -}}
{{- if ge $bytes 1099511627776 -}}{{ printf "%.1f TiB" (divf $bytes 1099511627776) }}
{{- else if ge $bytes 1073741824 -}}{{ printf "%.1f GiB" (divf $bytes 1073741824) }}
{{- else if ge $bytes 1048576 -}}{{ printf "%.1f MiB" (divf $bytes 1048576) }}
{{- else -}}{{ $bytes }} B
{{- end -}}{{- end -}}

{{/* bytes -> a Kubernetes quantity, rounded up to a MiB. */}}
{{- define "spillway.quantity" -}}
{{ div (add (int64 .) 1048575) 1048576 }}Mi
{{- end -}}

{{/* (value, path) -> a size as such a quantity. */}}
{{- define "spillway.sizeQuantity" -}}
{{- include "spillway.bytes" . | include "spillway.quantity" -}}
{{- end -}}

{{/* cores as Kubernetes writes them -> thousandths of a core. */}}
{{- define "spillway.milliCores" -}}
{{- $text := toString . -}}
{{- if hasSuffix "m" $text -}}{{ trimSuffix "m" $text }}{{- else -}}{{ mulf (float64 $text) 1000 }}{{- end -}}
{{- end -}}

{{/* (resources, path) -> a container's resources; memory as people write sizes. */}}
{{- define "spillway.resources" -}}
{{- range $kind := list "requests" "limits" }}
{{- $given := get $.resources $kind }}
{{ $kind }}:
  {{- with $given.cpu }}
  cpu: {{ . | quote }}{{ end }}
  {{- with $given.memory }}
  memory: {{ include "spillway.sizeQuantity" (dict "value" . "path" (printf "%s.%s.memory" $.path $kind)) }}{{ end }}
  {{- with $given.ephemeralStorage }}
  {{- $at := printf "%s.%s.ephemeralStorage" $.path $kind }}
  ephemeral-storage: {{ include "spillway.sizeQuantity" (dict "value" . "path" $at) }}
  {{- end }}{{- end }}{{- end -}}

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

{{/* (value, path, problems) -> bytes as decimal text. What is no size is reported by its path and counts as 0. */}}
{{- define "spillway.bytes" -}}
{{- if or (kindIs "float64" .value) (kindIs "int64" .value) (kindIs "int" .value) -}}{{ int64 .value }}
{{- else -}}
{{- $text := toString .value | trim -}}
{{- $units := dict "" 1 "B" 1 "KI" 1024 "MI" 1048576 "GI" 1073741824 "TI" 1099511627776 "KIB" 1024 "MIB" 1048576 "GIB" 1073741824 "TIB" 1099511627776 "KB" 1000 "MB" 1000000 "GB" 1000000000 "TB" 1000000000000 -}}
{{- $number := regexFind "^[0-9]+(\\.[0-9]+)?" $text -}}
{{- $unit := trimPrefix $number $text | trim | upper -}}
{{- if and $number (hasKey $units $unit) -}}{{ int64 (floor (mulf (float64 $number) (get $units $unit))) }}
{{- else -}}
{{- include "spillway.problem" (dict "problems" .problems "text" (printf "%s: %q is no size; write for example 512MiB, 200GiB, 1TB or a number of bytes" .path $text)) -}}0
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

{{/* (resources, path, problems) -> a container's resources; memory as people write sizes. */}}
{{- define "spillway.resources" -}}
{{- range $kind := list "requests" "limits" }}
{{- $given := get $.resources $kind }}
{{ $kind }}:
  {{- with $given.cpu }}
  cpu: {{ . | quote }}
  {{- end }}
  {{- with $given.memory }}
  memory: {{ include "spillway.quantity" (include "spillway.bytes" (dict "value" . "path" (printf "%s.%s.memory" $.path $kind) "problems" $.problems)) }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* (problems, text): remember what is wrong, so that all of it is told at once. */}}
{{- define "spillway.problem" -}}
{{- $_ := set .problems (printf "%03d" (len .problems)) .text -}}
{{- end -}}

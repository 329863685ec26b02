{{/* Reading values: laying maps over each other, whole numbers, words that YAML takes for booleans. */}}

{{/* (base, over): changes base. Keys of `over` win, maps are merged, null removes. */}}
{{- define "spillway.overlay" -}}
{{- range $key, $value := .over -}}
{{- if kindIs "invalid" $value -}}{{- $_ := unset $.base $key -}}
{{- else if and (kindIs "map" $value) (kindIs "map" (get $.base $key)) -}}
{{- include "spillway.overlay" (dict "base" (get $.base $key) "over" $value) -}}
{{- else -}}{{- $_ := set $.base $key $value -}}
{{- end -}}{{- end -}}{{- end -}}

{{/* map: changes it. Keys whose value is null are removed. */}}
{{- define "spillway.withoutNulls" -}}
{{- $map := . -}}
{{- range $key, $value := $map -}}
{{- if kindIs "invalid" $value -}}{{- $_ := unset $map $key -}}
{{- else if kindIs "map" $value -}}{{- include "spillway.withoutNulls" $value -}}
{{- end -}}{{- end -}}{{- end -}}

{{/* map or list: changes it. Keys that begin with `x-` are removed: an operator's own, such as anchors. */}}
{{- define "spillway.withoutOwnKeys" -}}
{{- $given := . -}}
{{- range $key, $value := $given -}}
{{- if and (kindIs "map" $given) (hasPrefix "x-" (toString $key)) -}}{{- $_ := unset $given $key -}}
{{- else if or (kindIs "map" $value) (kindIs "slice" $value) -}}{{- include "spillway.withoutOwnKeys" $value -}}
{{- end -}}{{- end -}}{{- end -}}

{{/* (section, out): every setting of the section into out, without nulls and an operator's own keys. So no template
names a setting that only passes through, and a new one needs no edit here. */}}
{{- define "spillway.passed" -}}
{{- range $key, $value := .section -}}
{{- if not (or (hasPrefix "x-" $key) (kindIs "invalid" $value)) -}}{{- $_ := set $.out $key $value -}}{{- end -}}
{{- end -}}{{- end -}}

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
{{- end -}}{{- end -}}{{- end -}}

{{/* true and false, which YAML 1.1 makes of a bare on and off -> "on" and "off". */}}
{{- define "spillway.onOff" -}}
{{- if kindIs "bool" . -}}{{ ternary "on" "off" . }}{{- else -}}{{ . }}{{- end -}}
{{- end -}}

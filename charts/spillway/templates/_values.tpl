{{/* Reading values: laying maps over each other, whole numbers, words that YAML takes for booleans. */}}

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

{{/* map: changes it. Keys whose value is null are removed. */}}
{{- define "spillway.withoutNulls" -}}
{{- $map := . -}}
{{- range $key, $value := $map -}}
{{- if kindIs "invalid" $value -}}{{- $_ := unset $map $key -}}
{{- else if kindIs "map" $value -}}{{- include "spillway.withoutNulls" $value -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* map or list: changes it. Keys that begin with `x-` are removed: an operator's own, such as anchors. */}}
{{- define "spillway.withoutOwnKeys" -}}
{{- $given := . -}}
{{- range $key, $value := $given -}}
{{- if and (kindIs "map" $given) (hasPrefix "x-" (toString $key)) -}}{{- $_ := unset $given $key -}}
{{- else if or (kindIs "map" $value) (kindIs "slice" $value) -}}{{- include "spillway.withoutOwnKeys" $value -}}
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

{{/* url -> the same without user, password and secrets among its parameters, for messages: they end up in logs. */}}
{{- define "spillway.shownUrl" -}}
{{- regexReplaceAll "(?i)((password|token|secret|key)=)[^&]*" (regexReplaceAll "^([A-Za-z0-9+.-]*:?/*).*@" . "${1}***@") "${1}***" -}}
{{- end -}}

{{/* (path, value, problems): every reference to a Secret below a value, found by its key's name, holds the name of a Secret.
A credential that was pasted there would lie in the objects for all to read, so it is refused and not repeated. */}}
{{- define "spillway.secretReferenceChecks" -}}
{{- $path := .path -}}{{- $problems := .problems -}}
{{- range $key, $value := .value -}}
{{- $at := ternary $key (printf "%s.%s" $path $key) (eq $path "") -}}
{{- $isReference := or (hasSuffix "ecret" $key) (hasSuffix "ecretKeyRef" $key) (hasSuffix "ecretRef" $key) -}}
{{- if kindIs "map" $value -}}
{{- if and $isReference (hasKey $value "name") -}}
{{- include "spillway.secretNameCheck" (dict "path" (printf "%s.name" $at) "name" $value.name "problems" $problems) -}}
{{- range $entry, $name := $value -}}
{{- if and (kindIs "string" $name) (hasSuffix "key" (lower $entry)) -}}
{{- include "spillway.secretEntryCheck" (dict "path" (printf "%s.%s" $at $entry) "name" $name "problems" $problems) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- include "spillway.secretReferenceChecks" (dict "path" $at "value" $value "problems" $problems) -}}
{{- else if kindIs "slice" $value -}}
{{- range $index, $entry := $value -}}
{{- if kindIs "map" $entry -}}
{{- if eq $key "pullSecrets" -}}{{- include "spillway.secretNameCheck" (dict "path" (printf "%s[%d].name" $at $index) "name" $entry.name "problems" $problems) -}}{{- end -}}
{{- include "spillway.secretReferenceChecks" (dict "path" (printf "%s[%d]" $at $index) "value" $entry "problems" $problems) -}}
{{- end -}}
{{- end -}}
{{- else if and (kindIs "string" $value) (hasSuffix "ecretKey" $key) -}}
{{- include "spillway.secretEntryCheck" (dict "path" $at "name" $value "problems" $problems) -}}
{{- else if and (kindIs "string" $value) (or $isReference (hasSuffix "ecretName" $key)) -}}
{{- include "spillway.secretNameCheck" (dict "path" $at "name" $value "problems" $problems) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (path, name, problems) */}}
{{- define "spillway.secretNameCheck" -}}
{{- $name := toString (default "" .name) -}}
{{- if and $name (or (gt (len $name) 253) (not (regexMatch "^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$" $name))) -}}
{{- include "spillway.problem" (dict "problems" .problems "text" (printf "%s: what is given (%d characters) is no name of a Secret: small letters, digits, dashes and dots; a credential goes into a Secret (kubectl create secret generic NAME --from-literal=KEY=...), and the name of that Secret goes here" .path (len $name))) -}}
{{- else -}}
{{- include "spillway.secretLookCheck" (dict "path" .path "name" $name "problems" .problems) -}}
{{- end -}}
{{- end -}}

{{/* (path, name, problems): which entry of a Secret it is. */}}
{{- define "spillway.secretEntryCheck" -}}
{{- if or (regexMatch "[^-._a-zA-Z0-9]" .name) (and (not .name) (not (hasSuffix "usernameKey" .path))) -}}
{{- include "spillway.problem" (dict "problems" .problems "text" (printf
  "%s: text of %d characters given, which entry of the Secret it is (letters, digits, dashes, dots and underscores) needed; correct it"
  .path (len .name))) -}}
{{- else -}}{{- include "spillway.secretLookCheck" . -}}
{{- end -}}
{{- end -}}

{{/* (path, name, problems): a key of small letters and digits is a valid name of a Secret, and of an entry of it. */}}
{{- define "spillway.secretLookCheck" -}}
{{- $run := "" -}}
{{- range regexFindAll "[A-Za-z0-9]+" .name -1 -}}{{- if gt (len .) (len $run) -}}{{- $run = . -}}{{- end -}}{{- end -}}
{{- $digits := len (regexReplaceAll "[^0-9]" $run "") -}}
{{- $isHex := and (ge (len $run) 32) (gt $digits 0) (regexMatch "^[0-9A-Fa-f]+$" $run) -}}
{{- $hasPrefix := and (ge (len $run) 16) (ge $digits 3) (regexMatch "^(sk|pk|rk|gh[pousr]|hf|glpat|xox[abprs])[-_]"
  .name) -}}
{{- $isUuid := regexMatch "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$" .name -}}
{{- if or $isHex $hasPrefix $isUuid (and (ge (len $run) 40) (ge $digits 6)) -}}
{{- include "spillway.problem" (dict "problems" .problems "text" (printf
  "%s: what is given (%d characters) looks like a key itself, which would lie in the objects for all to read; make another key, put it into a Secret (kubectl create secret generic NAME --from-literal=KEY=...), and write its name here"
  .path (len .name))) -}}
{{- end -}}
{{- end -}}

{{/* (problems, text): collects problems, so that all are reported at once. */}}
{{- define "spillway.problem" -}}
{{- $_ := set .problems (printf "%03d" (len .problems)) .text -}}
{{- end -}}

{{/* (value, path) -> the value as a message may show it: short; hidden if it may be a credential. */}}
{{- define "spillway.given" -}}
{{- if kindIs "invalid" .value -}}null
{{- else if kindIs "map" .value -}}a map
{{- else if kindIs "slice" .value -}}a list
{{- else if kindIs "string" .value -}}
{{- if or (regexMatch "(?i)(secret|passw|token|key|credential|url|address|endpoint|env|args|value|annotation)" .path) (gt (len .value) 64) -}}text of {{ len .value }} characters
{{- else -}}{{ printf "%q" .value }}{{- end -}}
{{- else -}}{{ include "spillway.number" .value }}
{{- end -}}
{{- end -}}

{{/* number -> as a person writes it, not 1e+06. */}}
{{- define "spillway.number" -}}
{{- if and (kindIs "float64" .) (eq (toString (float64 (int64 .))) (toString .)) -}}{{ int64 . }}{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{/* Credentials belong into Secrets: what looks like one and would lie in an object for all to read is refused, and never
repeated. files/credentials.yaml says what looks like one. */}}

{{/* (root, engines, problems) */}}
{{- define "spillway.credentialChecks" -}}
{{- $looks := .root.Files.Get "files/credentials.yaml" | fromYaml -}}{{- $values := .root.Values -}}
{{- $texts := list -}}
{{- range $item := .engines -}}
{{- $engine := $item.engine -}}{{- $path := $item.path -}}
{{- range $name, $value := $engine.extraEnv -}}
{{- if or (and (regexMatch $looks.name $name) (not (regexMatch $looks.harmless $value))) (regexMatch $looks.value
  $value) -}}
{{- $texts = append $texts (printf "%s.extraEnv.%s would lie in a ConfigMap in plain text; use extraEnvVars with valueFrom.secretKeyRef" $path $name) -}}
{{- end -}}
{{- end -}}
{{- range $index, $argument := $engine.extraArgs -}}
{{- if or (regexMatch $looks.value $argument) (regexMatch $looks.value (regexReplaceAll "^-[^=]*=" $argument "")) -}}
{{- $texts = append $texts (printf "%s.extraArgs[%d]: text of %d characters that looks like a credential would lie in a ConfigMap in plain text; use extraEnvVars with valueFrom.secretKeyRef" $path $index (len $argument)) -}}
{{- end -}}
{{- end -}}
{{- $texts = concat $texts (include "spillway.plainCredentials" (dict "path" $path "section" $engine "looks" $looks) | fromYamlArray) -}}
{{- end -}}
{{- range $key := list "gateway" "redis" -}}
{{- $texts = concat $texts (include "spillway.plainCredentials" (dict "path" $key "section" (get $values $key) "looks" $looks) | fromYamlArray) -}}
{{- end -}}
{{- range $texts -}}{{- include "spillway.problem" (dict "problems" $.problems "text" .) -}}{{- end -}}
{{- end -}}

{{/* (path, section, looks) -> list of texts: variables of the pod's containers with a credential as their plain value. */}}
{{- define "spillway.plainCredentials" -}}
{{- $texts := list -}}{{- $lists := dict (printf "%s.extraEnvVars" .path) .section.extraEnvVars -}}
{{- range $kind := list "sidecars" "initContainers" -}}
{{- range $index, $container := get $.section $kind -}}
{{- $_ := set $lists (printf "%s.%s[%d].env" $.path $kind $index) (default list $container.env) -}}
{{- end -}}
{{- end -}}
{{- range $at, $variables := $lists -}}
{{- range $variables -}}
{{- $value := toString (default "" .value) -}}
{{- /* $(NAME) is another variable's value, which Kubernetes puts there. */ -}}
{{- $isPlain := not (or (regexMatch $.looks.harmless $value) (regexMatch "\\$\\([A-Za-z_]" $value)) -}}
{{- if and $value (or (and (regexMatch $.looks.name .name) $isPlain) (regexMatch $.looks.value $value)) -}}
{{- $texts = append $texts (printf "%s: the value of %s would lie in the pod's specification in plain text; use valueFrom.secretKeyRef in its place" $at .name) -}}
{{- end -}}
{{- if and (eq (hasKey . "value") (hasKey . "valueFrom")) (hasKey . "value") -}}
{{- $texts = append $texts (printf "%s: %s has value and valueFrom, and Kubernetes takes one of the two; remove one" $at .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $texts -}}
{{- end -}}

{{/* Which of vLLM's arguments extraArgs may not hold, judged as services/engine/src/spillway_engine/extra_arguments.py
judges them; tests/chart holds the two to one list of cases. */}}

{{/* (root, item) -> list of texts. */}}
{{- define "spillway.extraArgumentProblems" -}}
{{- $refused := .root.Files.Get "files/refused-arguments.yaml" | fromYaml -}}
{{- $known := concat (keys $refused.decidedBySetting) (keys $refused.fixed) (keys $refused.secret) | sortAlpha -}}
{{- $path := .item.path -}}{{- $names := .item.settings.door -}}
{{- $texts := list -}}
{{- range .item.engine.extraArgs -}}
{{- if hasPrefix "-" . -}}
{{- $name := regexReplaceAll "(?s)[=.\\s].*$" . "" -}}
{{- if hasPrefix "--" $name -}}{{- $name = replace "_" "-" $name -}}{{- end -}}
{{- /* argparse takes every unique beginning of a name. */ -}}
{{- $meant := $name -}}
{{- if and (not (has $name $known)) (trimAll "-" $name) -}}
{{- range $full := $known -}}{{- if and (eq $meant $name) (hasPrefix $name $full) -}}{{- $meant = $full -}}{{- end -}}{{- end -}}
{{- end -}}
{{- if or (hasKey $refused.secret $meant) (regexMatch $refused.secretName $name) -}}
{{- $texts = append $texts (printf "%s.extraArgs: %s would show a secret in a ConfigMap; use %s" $path $name (get $refused.secret $meant | default "extraEnvVars with valueFrom.secretKeyRef")) -}}
{{- else if hasKey $refused.decidedBySetting $meant -}}
{{- $texts = append $texts (printf "%s.extraArgs: %s is decided by %s; change that instead" $path $name (include "spillway.settingName" (dict "names" $names "setting" (get $refused.decidedBySetting $meant)))) -}}
{{- else if hasKey $refused.fixed $meant -}}
{{- $texts = append $texts (printf "%s.extraArgs: %s %s" $path $name (get $refused.fixed $meant)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $texts -}}
{{- end -}}

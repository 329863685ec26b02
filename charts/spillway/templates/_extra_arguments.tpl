{{/* Which of vLLM's arguments extraArgs may not hold, judged as services/engine/src/spillway_engine/extra_arguments.py
judges them; tests/chart holds the two to one list of cases. */}}

{{/* (root, item) -> list of texts. */}}
{{- define "spillway.extraArgumentProblems" -}}
{{- $refused := .root.Files.Get "files/refused-arguments.yaml" | fromYaml -}}
{{- $fixed := dict -}}
{{- range $why, $arguments := $refused.fixed -}}{{- range $arguments -}}{{- $_ := set $fixed . $why -}}{{- end -}}{{- end -}}
{{- $known := concat (keys $refused.decidedBySetting) (keys $fixed) (keys $refused.secret) | sortAlpha -}}
{{- $path := .item.path -}}{{- $names := .item.settings.door -}}
{{- $texts := list -}}
{{- $twoEntries := "write --flag=value, or flag and value as two entries" -}}
{{- $isTaken := false -}}
{{- range $index, $argument := .item.engine.extraArgs -}}
{{- if and (not (hasPrefix "-" .)) (not $isTaken) -}}
{{- $texts = append $texts (printf "%s.extraArgs[%d]: no flag before it takes this value; %s" $path $index $twoEntries) -}}
{{- end -}}
{{- if hasPrefix "-" . -}}
{{- $isTaken = not (contains "=" .) -}}
{{- $name := regexReplaceAll "(?s)[=.\\s].*$" . "" -}}
{{- if hasPrefix "--" $name -}}{{- $name = replace "_" "-" $name -}}{{- end -}}
{{- /* argparse takes every unique beginning of a name. */ -}}
{{- $meant := $name -}}
{{- if and (not (has $name $known)) (trimAll "-" $name) -}}
{{- /* A letter may have its value attached: -n2. */ -}}
{{- $letter := trunc 2 $name -}}
{{- range $full := $known -}}{{- if and (eq $meant $name) (hasPrefix $name $full) -}}{{- $meant = $full -}}{{- end -}}{{- end -}}
{{- $short := regexReplaceAll "^(-[a-z]{2,})[0-9]+$" $name "${1}" -}}
{{- if and (eq $meant $name) (has $short $known) -}}{{- $meant = $short -}}{{- end -}}
{{- if and (eq $meant $name) (ne $letter "--") (has $letter $known) -}}{{- $meant = $letter -}}{{- end -}}
{{- end -}}
{{- if or (hasKey $refused.secret $meant) (regexMatch $refused.secretName $name) -}}
{{- $texts = append $texts (printf "%s.extraArgs: %s would show a secret in a ConfigMap; use %s" $path $name (get $refused.secret $meant | default "extraEnvVars with valueFrom.secretKeyRef")) -}}
{{- else if hasKey $refused.decidedBySetting $meant -}}
{{- $texts = append $texts (printf "%s.extraArgs: %s is decided by %s; change that instead" $path $name (include "spillway.settingName" (dict "names" $names "setting" (get $refused.decidedBySetting $meant)))) -}}
{{- else if hasKey $fixed $meant -}}
{{- $texts = append $texts (printf "%s.extraArgs: %s %s" $path $name (get $fixed $meant)) -}}
{{- else if regexMatch "^[^=]*\\s" . -}}
{{- $texts = append $texts (printf "%s.extraArgs: %s and what follows are one word to vLLM, which knows none such; %s" $path $name $twoEntries) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $texts -}}
{{- end -}}

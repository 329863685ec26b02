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
{{- /* What vLLM's own parser would say, where the image is the chart's; one of your own may know more arguments. */ -}}
{{- $image := .item.engine.image -}}{{- $kinds := dict -}}
{{- if not (or $image.tag $image.digest (ne $image.repository "spillway-engine")) -}}
{{- $kinds = include "spillway.vllmArguments" (dict "root" .root "version" (toString $image.vllm)) | fromJson -}}
{{- end -}}
{{- $waiting := "" -}}{{- $kind := "" -}}
{{- range $index, $argument := .item.engine.extraArgs -}}
{{- if and (not (hasPrefix "-" .)) (not $isTaken) -}}
{{- $texts = append $texts (printf "%s.extraArgs[%d]: no flag before it takes this value; %s" $path $index $twoEntries) -}}
{{- else if not (hasPrefix "-" .) -}}
{{- with include "spillway.argumentValue" (dict "kind" $kind "name" $waiting "value" .) -}}{{- $texts = append $texts (printf "%s.extraArgs: %s: %s" $path $waiting .) -}}{{- end -}}
{{- $kind = "" -}}
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
{{- else if and $kinds (regexMatch "^--." $name) -}}
{{- $full := "" -}}{{- $positive := regexReplaceAll "^--no-" $name "--" -}}
{{- if hasKey $kinds $name -}}{{- $full = $name -}}
{{- else if eq (default "" (get $kinds $positive)) "switches" -}}{{- $full = $positive -}}
{{- else -}}{{- range $one, $_ := $kinds -}}{{- if hasPrefix $name $one -}}{{- $full = $one -}}{{- end -}}{{- end -}}
{{- end -}}
{{- $takes := get $kinds $full -}}{{- $hasValue := contains "=" . -}}
{{- if not $full -}}
{{- $texts = append $texts (printf "%s.extraArgs: %s is no argument of vLLM %s; remove it, or name an image of your own that knows it by image.tag" $path $name $image.vllm) -}}
{{- else if and (eq $takes "switches") $hasValue -}}
{{- $texts = append $texts (printf "%s.extraArgs: %s takes no value; write it alone, or %s for the opposite" $path $name (regexReplaceAll "^--(no-)?" $full "--no-")) -}}
{{- else if eq $takes "switches" -}}{{- $isTaken = false -}}
{{- else if $hasValue -}}
{{- if eq $name (regexReplaceAll "(?s)=.*$" (replace "_" "-" .) "") -}}
{{- with include "spillway.argumentValue" (dict "kind" $takes "name" $full "value" (regexReplaceAll "(?s)^[^=]*=" . "")) -}}{{- $texts = append $texts (printf "%s.extraArgs: %s: %s" $path $name .) -}}{{- end -}}
{{- end -}}
{{- else -}}
{{- /* What follows --attention-config.backend is a word, not the whole JSON. */ -}}
{{- $waiting = $name -}}{{- $kind = ternary "" $takes (contains "." .) -}}
{{- $following := index (concat (slice $.item.engine.extraArgs (int (add1 $index))) (list "")) 0 -}}
{{- if and (has $takes (list "numbers" "json")) (or (not $following) (regexMatch "^-[^0-9.]" $following)) -}}
{{- $texts = append $texts (printf "%s.extraArgs: %s has no value; %s" $path $name $twoEntries) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $batch := include "spillway.extraArgument" (dict "arguments" .item.engine.extraArgs "name" "--max-num-batched-tokens") -}}
{{- $sequences := include "spillway.extraArgument" (dict "arguments" .item.engine.extraArgs "name" "--max-num-seqs") -}}
{{- if and (regexMatch "^[0-9]+$" $batch) (regexMatch "^[0-9]+$" $sequences) -}}
{{- if lt (int64 $batch) (int64 $sequences) -}}
{{- $texts = append $texts (printf "%s.extraArgs: --max-num-batched-tokens: %s, at least the %s of --max-num-seqs needed, as each sequence of a batch computes a token; raise the first or lower the second" $path $batch $sequences) -}}
{{- end -}}
{{- end -}}
{{- range $name, $value := dict "--max-num-batched-tokens" $batch "--max-num-seqs" $sequences -}}
{{- if regexMatch "^(-[0-9]+|[+]?0+)$" $value -}}
{{- $texts = append $texts (printf "%s.extraArgs: %s: %s, at least 1 needed; raise it" $path $name $value) -}}
{{- end -}}
{{- end -}}
{{- range .item.engine.extraArgs -}}
{{- if and (eq "--enable-auto-tool-choice" (replace "_" "-" .)) (not (include "spillway.extraArgument" (dict "arguments" $.item.engine.extraArgs "name" "--tool-call-parser"))) -}}
{{- $texts = append $texts (printf "%s.extraArgs: --enable-auto-tool-choice needs --tool-call-parser; add it, such as --tool-call-parser=hermes" $path) -}}
{{- end -}}
{{- end -}}
{{- toYaml $texts -}}
{{- end -}}

{{/* (arguments, name) -> the value that is given last; nothing where there is none. Abbreviations are not followed. */}}
{{- define "spillway.extraArgument" -}}
{{- $value := "" -}}
{{- range $at, $argument := .arguments -}}
{{- if eq $.name (replace "_" "-" (regexReplaceAll "(?s)=.*$" $argument "")) -}}
{{- $value = contains "=" $argument | ternary (regexReplaceAll "(?s)^[^=]*=" $argument "") (index (append $.arguments "") (add1 $at | int)) -}}
{{- end -}}
{{- end -}}
{{- $value -}}
{{- end -}}

{{/* (root, version) -> JSON: argument of this vLLM's server -> what it takes; {} for a version without a list. */}}
{{- define "spillway.vllmArguments" -}}
{{- $table := .root.Files.Get "files/vllm-arguments.yaml" | fromYaml -}}{{- $kinds := dict -}}
{{- if and (ne .version "all") (hasKey $table .version) -}}
{{- range list $table.all (get $table .version) -}}
{{- range $kind, $names := . -}}{{- range splitList " " $names -}}{{- $_ := set $kinds . $kind -}}{{- end -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $kinds -}}
{{- end -}}

{{/* (kind, name, value) -> what is wrong with the value of such an argument; nothing where it is right. */}}
{{- define "spillway.argumentValue" -}}
{{- if and (eq .kind "numbers") (not (regexMatch "^[-+]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][-+]?[0-9]+)?$" .value)) (not (has .value (list "" "None"))) -}}
{{ printf "%q" .value }} given, a number needed; write the number alone
{{- else if and (eq .name "--gpu-memory-utilization") .value (or (le (float64 .value) 0.0) (gt (float64 .value) 1.0)) -}}
{{ .value }} given, a share of the device's memory above 0 and up to 1 needed; write 0.9 for 90 %
{{- else if and (eq .kind "json") (not (regexMatch "^\\s*([\\[{\"0-9-]|(true|false|null)\\s*$)" .value)) (not (has .value (list "" "None"))) -}}
text of {{ len .value }} characters given that is no JSON, which this argument takes; write a map as {"name": "value"}, a list as ["value"]
{{- else if and (hasPrefix "{" .value) (hasKey (fromJson .value) "Error") (not (contains "\"Error\"" .value)) -}}
text of {{ len .value }} characters given that is no JSON; close every brace and quote, and write names in double quotes
{{- end -}}
{{- end -}}

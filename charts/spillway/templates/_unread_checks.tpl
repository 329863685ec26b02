{{/* Settings that nothing reads as the other ones are: files/unread-settings.yaml. */}}

{{/* (root, groups, problems). groups: key -> an engine with its defaults laid out. */}}
{{- define "spillway.unreadChecks" -}}
{{- $values := .root.Values -}}{{- $groups := .groups -}}{{- $problems := .problems -}}
{{- $seen := dict -}}
{{- range $rule := .root.Files.Get "files/unread-settings.yaml" | fromYamlArray -}}
{{- range $setting, $default := $rule.settings -}}
{{- $unset := toJson $default -}}
{{- if hasPrefix "engine." $setting -}}
{{- $own := trimPrefix "engine." $setting -}}{{- $by := trimPrefix "engine." $rule.readBy -}}
{{- $isReadAnywhere := false -}}
{{- range $key, $engine := $groups -}}
{{- $choice := include "spillway.valueAt" (dict "value" $engine "path" $by) -}}
{{- $isRead := include "spillway.isChosen" (dict "rule" $rule "choice" $choice) -}}
{{- if $isRead -}}{{- $isReadAnywhere = true -}}
{{- else if $key -}}
{{- /* What an entry inherits from `engine` may be there for the other entries. */ -}}
{{- $given := include "spillway.valueAt" (dict "value" (get $values.engines $key) "path" $own) -}}
{{- if not (has $given (list "" "null" $unset)) -}}
{{- include "spillway.unreadProblem" (dict "path" (printf "engines.%s.%s" $key $own) "by" (printf "engines.%s.%s" $key $by) "rule" $rule "given" $given "choice" $choice "seen" $seen "problems" $problems) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if not $isReadAnywhere -}}
{{- $given := include "spillway.valueAt" (dict "value" $values.engine "path" $own) -}}
{{- if not (has $given (list "" "null" $unset)) -}}
{{- include "spillway.unreadProblem" (dict "path" $setting "by" $rule.readBy "rule" $rule "given" $given "choice" (include "spillway.valueAt" (dict "value" $values.engine "path" $by)) "seen" $seen "problems" $problems) -}}
{{- end -}}
{{- end -}}
{{- else -}}
{{- $given := include "spillway.valueAt" (dict "value" $values "path" $setting) -}}
{{- if not (has $given (list "" "null" $unset)) -}}
{{- $choice := include "spillway.valueAt" (dict "value" $values "path" $rule.readBy) -}}
{{- if not (include "spillway.isChosen" (dict "rule" $rule "choice" $choice)) -}}
{{- include "spillway.unreadProblem" (dict "path" $setting "by" $rule.readBy "rule" $rule "given" $given "choice" $choice "seen" $seen "problems" $problems) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (value, path) -> what lies there as JSON; nothing: there is no such key. */}}
{{- define "spillway.valueAt" -}}
{{- $here := .value -}}{{- $isThere := true -}}
{{- range splitList "." .path -}}
{{- if $isThere -}}
{{- if kindIs "map" $here -}}{{- $isThere = hasKey $here . -}}{{- if $isThere -}}{{- $here = get $here . -}}{{- end -}}
{{- else -}}{{- $isThere = false -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $isThere -}}{{ toJson $here }}{{- end -}}
{{- end -}}

{{/* (rule, choice) -> is the choice, as JSON, one with which the rule's settings are read? */}}
{{- define "spillway.isChosen" -}}
{{- if not (hasKey .rule "values") -}}
{{- if not (has .choice (list "" "null" "\"\"")) -}}true{{- end -}}
{{- else -}}
{{- $choice := .choice -}}
{{- range .rule.values -}}{{- if eq (toJson .) $choice -}}true{{- end -}}{{- end -}}
{{- end -}}
{{- end -}}

{{/* (path, by, rule, given, choice, seen, problems) */}}
{{- define "spillway.unreadProblem" -}}
{{- if not (hasKey .seen .path) -}}
{{- $_ := set .seen .path true -}}
{{- $shown := include "spillway.given" (dict "value" (fromJson (printf "{\"value\": %s}" .given)).value "path" .path) -}}
{{- $choice := trimAll "\"" .choice | default "empty" -}}
{{- $words := list -}}{{- range .rule.values -}}{{- $words = append $words (toString .) -}}{{- end -}}
{{- if $words -}}
{{- include "spillway.problem" (dict "problems" .problems "text" (printf "%s: %s given, but it is read with %s: %s alone, which is %s; set that, or remove this" .path $shown .by (join " or " $words) $choice)) -}}
{{- else -}}
{{- include "spillway.problem" (dict "problems" .problems "text" (printf "%s: %s given, but it is read with %s alone, which is %s; give that, or remove this" .path $shown .by $choice)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

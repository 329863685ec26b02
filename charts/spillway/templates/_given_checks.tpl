{{/* What values.schema.json cannot say, as it sees neither what Helm's null removed nor the cluster's version. */}}

{{/* (root, problems) */}}
{{- define "spillway.givenChecks" -}}
{{- $values := .root.Values -}}{{- $problems := .problems -}}
{{- if .root.Chart.IsRoot -}}
{{- range $key, $value := default dict $values.global -}}
{{- include "spillway.problem" (dict "problems" $problems "text" (printf
  "global.%s: no setting of this chart is below global; image.registry and image.pullSecrets hold for all of its images: remove it"
  $key)) -}}
{{- end -}}
{{- end -}}
{{- range $path, $keys := .root.Files.Get "files/needed-settings.json" | fromJson -}}
{{- $section := $values -}}
{{- range compact (splitList "." $path) -}}{{- $section = get (default dict $section) . -}}{{- end -}}
{{- if kindIs "map" $section -}}
{{- range $keys -}}
{{- if not (hasKey $section .) -}}
{{- include "spillway.problem" (dict "problems" $problems "text" (printf
  "%s: null given, but nothing stands in for its default; remove the line" (join "." (compact (list $path .))))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $since := .root.Files.Get "files/kubernetes-since.yaml" | fromYaml -}}
{{- $sections := dict "engine" $values.engine "gateway" $values.gateway "redis" $values.redis -}}
{{- range $key, $engine := $values.engines -}}{{- $_ := set $sections (printf "engines.%s" $key) $engine -}}{{- end -}}
{{- range $name, $section := $sections -}}
{{- range $key := $since.settings -}}
{{- with get (default dict $section) $key -}}
{{- include "spillway.sinceCheck" (dict "path" (printf "%s.%s" $name $key) "value" . "fields" $since.fields
  "version" $.root.Capabilities.KubeVersion.Version "problems" $problems) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (path, value, fields, version, problems): refuses what the cluster's Kubernetes does not have yet. */}}
{{- define "spillway.sinceCheck" -}}
{{- if kindIs "slice" .value -}}
{{- range $index, $entry := .value -}}
{{- include "spillway.sinceCheck" (merge (dict "path" (printf "%s[%d]" $.path $index) "value" $entry) (omit $ "value")) -}}
{{- end -}}
{{- else if kindIs "map" .value -}}
{{- range $key, $entry := .value -}}
{{- $at := printf "%s.%s" $.path $key -}}
{{- range $field, $since := $.fields -}}
{{- if and (regexMatch (printf "%s$" $field) $at) (semverCompare (printf "<%s-0" $since) $.version)
  (not (kindIs "invalid" $entry)) -}}
{{- include "spillway.problem" (dict "problems" $.problems "text" (printf
  "%s: given, but Kubernetes %s does not have it, which came with %s; remove it, or bring the cluster to that version (helm template: --kube-version)"
  $at (regexFind "[0-9]+[.][0-9]+" $.version) $since)) -}}
{{- end -}}
{{- end -}}
{{- include "spillway.sinceCheck" (merge (dict "path" $at "value" $entry) (omit $ "value")) -}}
{{- end -}}
{{- end -}}
{{- end -}}

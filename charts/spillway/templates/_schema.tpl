{{/*
Types, words, bounds and names of keys: files/values.schema.json, read here and not by Helm. The two majors of Helm word
a schema's refusal differently, name neither the nearest key nor a remedy, and show only the first kind of problem.
*/}}

{{/* (root, problems) */}}
{{- define "spillway.schemaChecks" -}}
{{- $schema := .root.Files.Get "files/values.schema.json" | fromJson -}}
{{- $values := .root.Values -}}
{{- if .root.Chart.IsRoot -}}
{{- range $key, $value := default dict $values.global -}}
{{- include "spillway.problem" (dict "problems" $.problems "text" (printf "global.%s: no setting of this chart is below global; image.registry and image.pullSecrets hold for all of its images: remove it" $key)) -}}
{{- end -}}
{{- end -}}
{{- /* With the schema goes what belongs to no type: keys of others, for the message about an unknown one. */ -}}
{{- $_ := set $schema "nativeKeys" (.root.Files.Get "files/native-keys.yaml" | fromYaml) -}}
{{- $_ = set $schema "withoutSupport" (.root.Files.Get "files/settings-without-support.yaml" | fromYaml) -}}
{{- $_ = set $schema "kubeVersion" .root.Capabilities.KubeVersion.Version -}}
{{- $types := get $schema "$defs" -}}
{{- range $name, $type := get (.root.Files.Get "files/kubernetes-types.json" | fromJson) "$defs" -}}{{- $_ := set $types $name $type -}}{{- end -}}
{{- include "spillway.schemaCheck" (dict "whole" $schema "schema" $schema "value" $values "path" "" "problems" .problems) -}}
{{- end -}}

{{/* (whole, schema, value, path, problems): one value against its part of the schema, and what is below it. */}}
{{- define "spillway.schemaCheck" -}}
{{- $whole := .whole -}}{{- $problems := .problems -}}{{- $path := .path -}}{{- $value := .value -}}{{- $schema := .schema -}}
{{- with get $schema "$ref" -}}{{- $schema = get (get $whole "$defs") (base .) -}}{{- end -}}
{{- range $schema.allOf -}}{{- include "spillway.schemaCheck" (dict "whole" $whole "schema" . "value" $value "path" $path "problems" $problems) -}}{{- end -}}
{{- $text := "" -}}
{{- if not (and (kindIs "map" $value) (contains "object" (toString (default "object" $schema.type)))) -}}
{{- $text = include "spillway.schemaText" (dict "schema" $schema "value" $value "path" $path) -}}
{{- end -}}
{{- if $text -}}
{{- include "spillway.problem" (dict "problems" $problems "text" (printf "%s: %s" (default "values" $path) $text)) -}}
{{- else if kindIs "map" $value -}}
{{- $known := default dict $schema.properties -}}
{{- if $schema.title -}}{{- range include "spillway.fieldProblems" (dict "schema" $schema "value" $value "path" $path) | fromYamlArray -}}
{{- include "spillway.problem" (dict "problems" $problems "text" .) -}}
{{- end -}}{{- end -}}
{{- $others := get $schema "additionalProperties" -}}
{{- range $key := default list $schema.required -}}
{{- if not (hasKey $value $key) -}}
{{- $needed := default dict (get $known $key) -}}
{{- with get $needed "$ref" -}}{{- $needed = get (get $whole "$defs") (base .) -}}{{- end -}}
{{- $missing := ternary (printf "nothing given, %s needed; add it" (include "spillway.schemaNeeded" $needed)) "null given, but nothing stands in for its default; remove the line" (or (contains "]" $path) (and $path $schema.title | empty | not)) -}}
{{- include "spillway.problem" (dict "problems" $problems "text" (printf "%s: %s" (include "spillway.below" (dict "path" $path "key" $key)) $missing)) -}}
{{- end -}}
{{- end -}}
{{- range $key, $below := $value -}}
{{- if hasKey $known $key -}}
{{- /* The common case without another include, which is dear: a single value that is right. */ -}}
{{- $own := get $known $key -}}
{{- if and $own.since (not (kindIs "invalid" $below)) -}}
{{- if semverCompare (printf "<%s-0" $own.since) $whole.kubeVersion -}}
{{- include "spillway.problem" (dict "problems" $problems "text" (printf "%s: given, but Kubernetes %s does not have it, which came with %s; remove it, or bring the cluster to that version (helm template: --kube-version)" (include "spillway.below" (dict "path" $path "key" $key)) (regexFind "[0-9]+[.][0-9]+" $whole.kubeVersion) $own.since)) -}}
{{- end -}}
{{- end -}}
{{- with get $own "$ref" -}}{{- $own = get (get $whole "$defs") (base .) -}}{{- end -}}
{{- $kind := kindOf $below -}}{{- $types := toString $own.type -}}{{- $isRight := false -}}
{{- if eq $kind "string" -}}
{{- $isRight = and (contains "string" $types) (not $own.enum) (or (not $own.pattern) (regexMatch $own.pattern $below)) (not $own.minLength) (or (not $own.maxLength) (le (len $below) (int $own.maxLength))) -}}
{{- else if eq $kind "float64" -}}
{{- $isRight = and (or (contains "number" $types) (and (contains "integer" $types) (eq $below (floor $below)))) (or (not (hasKey $own "minimum")) (ge $below $own.minimum)) (or (not (hasKey $own "exclusiveMinimum")) (gt $below $own.exclusiveMinimum)) (or (not (hasKey $own "maximum")) (le $below $own.maximum)) (not $own.multipleOf) -}}
{{- else if eq $kind "bool" -}}{{- $isRight = eq $types "boolean" -}}
{{- else if eq $kind "invalid" -}}{{- $isRight = contains "null" $types -}}
{{- else if eq $kind "slice" -}}{{- $isRight = and (not $below) (contains "array" $types) (not $own.minItems) -}}
{{- end -}}
{{- if not $isRight -}}
{{- include "spillway.schemaCheck" (dict "whole" $whole "schema" $own "value" $below "path" (include "spillway.below" (dict "path" $path "key" $key)) "problems" $problems) -}}
{{- end -}}
{{- else if kindIs "map" $others -}}
{{- with $schema.propertyNames -}}
{{- $names := . -}}
{{- with get . "$ref" -}}{{- $names = get (get $whole "$defs") (base .) -}}{{- end -}}
{{- if not (regexMatch $names.pattern $key) -}}
{{- include "spillway.problem" (dict "problems" $problems "text" (printf "%s: the key %q given, %s needed; rename it" $path $key $names.description)) -}}
{{- end -}}
{{- end -}}
{{- include "spillway.schemaCheck" (dict "whole" $whole "schema" $others "value" $below "path" (include "spillway.below" (dict "path" $path "key" $key)) "problems" $problems) -}}
{{- else if and (kindIs "bool" $others) (not $others) -}}
{{- include "spillway.problem" (dict "problems" $problems "text" (printf "%s: no such setting; %s" (include "spillway.below" (dict "path" $path "key" $key)) (include "spillway.nearestSetting" (dict "whole" $whole "path" $path "key" $key "known" (keys $known) "isOfKubernetes" (and $path $schema.title))))) -}}
{{- end -}}
{{- end -}}
{{- else if and (kindIs "slice" $value) $schema.items -}}
{{- range $index, $entry := $value -}}
{{- include "spillway.schemaCheck" (dict "whole" $whole "schema" $schema.items "value" $entry "path" (printf "%s[%d]" $path $index) "problems" $problems) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (schema, value: a map, path) -> list of texts: what rules between the fields of a type of Kubernetes it breaks. */}}
{{- define "spillway.fieldProblems" -}}
{{- $value := .value -}}{{- $at := default "values" .path -}}
{{- $texts := list -}}
{{- range $kind := list "exactlyOne" "atMostOne" -}}
{{- with get $.schema $kind -}}
{{- $given := list -}}
{{- range . -}}{{- if not (kindIs "invalid" (get $value .)) -}}{{- if hasKey $value . -}}{{- $given = append $given . -}}{{- end -}}{{- end -}}{{- end -}}
{{- if gt (len $given) 1 -}}
{{- $texts = append $texts (printf "%s: %s given, one of them needed; remove the others" $at (join ", " $given)) -}}
{{- else if and (not $given) (eq $kind "exactlyOne") -}}
{{- $texts = append $texts (printf "%s: nothing given, one of %s needed; add it" $at (join ", " .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $rule := .schema.goesWith -}}
{{- $by := get $value .by -}}{{- $field := get $value .field -}}
{{- $words := list -}}{{- range .values -}}{{- $words = append $words (toString .) -}}{{- end -}}
{{- $isThere := not (empty $field) -}}
{{- if and $isThere (not (has $by .values)) -}}
{{- $texts = append $texts (printf "%s.%s: given, but it goes with %s: %s alone; remove it, or set that" $at .field .by (join " or " $words)) -}}
{{- else if and (not $isThere) .demanded (has $by .values) -}}
{{- $texts = append $texts (printf "%s.%s: nothing given, and %s: %s needs it; add it" $at .field .by $by) -}}
{{- end -}}
{{- end -}}
{{- /* What no list of fields can say. */ -}}
{{- if and (eq (toString .schema.title) "NodeSelectorRequirement") (has (toString $value.operator) (list "Gt" "Lt")) $value.values -}}
{{- if or (ne (len $value.values) 1) (not (regexMatch "^-?[0-9]+$" (toString (first $value.values)))) -}}
{{- $texts = append $texts (printf "%s.values: %s given, one whole number in quotes needed by operator: %s; write one, such as [\"16\"]" $at (join ", " $value.values) $value.operator) -}}
{{- end -}}
{{- else if and (eq (toString .schema.title) "NetworkPolicyPort") $value.endPort -}}
{{- if kindIs "string" (default "" $value.port) -}}
{{- $texts = append $texts (printf "%s.endPort: %v given, but port is no number; a range needs port: its first port as a number" $at (int64 $value.endPort)) -}}
{{- else if lt (float64 $value.endPort) (float64 $value.port) -}}
{{- $texts = append $texts (printf "%s.endPort: %d given, at least port: %d needed; raise it" $at (int64 $value.endPort) (int64 $value.port)) -}}
{{- end -}}
{{- else if and (eq (toString .schema.title) "PodsMetricSource") (kindIs "map" $value.target) -}}
{{- if ne (toString $value.target.type) "AverageValue" -}}
{{- $texts = append $texts (printf "%s.target.type: %v given, AverageValue needed by a metric of pods; set that, with averageValue" $at $value.target.type) -}}
{{- end -}}
{{- end -}}
{{- toYaml $texts -}}
{{- end -}}

{{/* (path, key) */}}
{{- define "spillway.below" -}}
{{- if .path -}}{{ .path }}.{{ end -}}{{ .key }}
{{- end -}}

{{/* (schema, value, path) -> what is wrong with the value itself: given, needed, remedy. Nothing: it is right. */}}
{{- define "spillway.schemaText" -}}
{{- $schema := .schema -}}{{- $value := .value -}}
{{- $given := include "spillway.given" . -}}
{{- $isNumber := or (kindIs "float64" $value) (kindIs "int64" $value) (kindIs "int" $value) -}}
{{- $type := include "spillway.schemaTypeText" (dict "schema" $schema "value" $value "isNumber" $isNumber) -}}
{{- if $type -}}{{ $given }} given, {{ $type }}
{{- else if and $schema.enum (not (has $value $schema.enum)) -}}
{{- $words := list -}}{{- $near := "" -}}
{{- range $word := $schema.enum -}}
{{- if kindIs "string" $word -}}
{{- $words = append $words (default "\"\"" $word) -}}
{{- if and (kindIs "string" $value) (eq (lower $word) (lower (toString $value))) -}}{{- $near = $word -}}{{- end -}}
{{- else if kindIs "float64" $word -}}{{- $words = append $words (toString $word) -}}
{{- end -}}
{{- end -}}
{{- if and (not $near) (kindIs "string" $value) -}}{{- $near = include "spillway.nearestWord" (dict "word" $value "words" (without $words "\"\"" | sortAlpha)) -}}{{- end -}}
{{ $given }} given, one of {{ join ", " $words }} needed; {{ if $near }}{{ $near }} is the nearest: write that, if it is meant{{ else }}write one of them{{ end }}
{{- else if $isNumber -}}
{{- $number := float64 $value -}}
{{- if and (hasKey $schema "minimum") (lt $number (float64 $schema.minimum)) -}}{{ $given }} given, at least {{ include "spillway.number" $schema.minimum }} needed; raise it
{{- else if and (hasKey $schema "exclusiveMinimum") (le $number (float64 $schema.exclusiveMinimum)) -}}{{ $given }} given, more than {{ $schema.exclusiveMinimum }} needed; raise it
{{- else if and (hasKey $schema "maximum") (gt $number (float64 $schema.maximum)) -}}{{ $given }} given, at most {{ include "spillway.number" $schema.maximum }} needed; lower it
{{- else if $schema.multipleOf -}}
{{- $step := int64 $schema.multipleOf -}}
{{- if mod (int64 $value) $step -}}{{ $given }} given, a multiple of {{ $step }} needed; set it to {{ mul (div (add (int64 $value) (sub $step 1)) $step) $step }}{{- end -}}
{{- end -}}
{{- else if kindIs "slice" $value -}}
{{- if and $schema.minItems (lt (len $value) (int $schema.minItems)) -}}{{ if $value -}}
{{ len $value }} entries given, {{ int $schema.minItems }} needed{{ with $schema.description }} ({{ . }}){{ end }}; add what is missing
{{- else }}an empty list given, an entry needed; add one, or remove the list{{ end }}
{{- else if and $schema.maxItems (gt (len $value) (int $schema.maxItems)) -}}{{ len $value }} entries given, at most {{ $schema.maxItems }} needed; remove some
{{- else if and $schema.uniqueItems (ne (len $value) (len (uniq $value))) -}}{{ if kindIs "map" (first $value) }}a list with one entry twice{{ else }}{{ join ", " $value }}{{ end }} given, each once needed; remove what is there twice
{{- end -}}
{{- else if kindIs "string" $value -}}
{{- if and $schema.minLength (lt (len $value) (int $schema.minLength)) -}}empty text given, {{ default "a name" $schema.description }} needed; fill it in
{{- else if and $schema.maxLength (gt (len $value) (int $schema.maxLength)) -}}{{ len $value }} characters given, at most {{ $schema.maxLength }} needed; shorten it
{{- else if $schema.pattern -}}
{{- if not (regexMatch $schema.pattern $value) -}}{{ $given }} given, {{ default $schema.pattern $schema.description }} needed; correct it{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (schema, value, isNumber) -> needed and remedy, where the value is of another type than the schema's. */}}
{{- define "spillway.schemaTypeText" -}}
{{- $types := .schema.type -}}{{- if kindIs "string" $types -}}{{- $types = list $types -}}{{- end -}}
{{- $kind := kindOf .value -}}
{{- /* What 64 bits do not hold is whole all the same, where a bound will say how much may be. */ -}}
{{- if .isNumber -}}{{- $kind = or (eq (float64 .value) (float64 (int64 .value))) (and (hasKey .schema "maximum") (gt (float64 .value) 9e18)) | ternary "integer" "number" -}}{{- end -}}
{{- $kind = get (dict "invalid" "null" "map" "object" "slice" "array" "bool" "boolean") $kind | default $kind -}}
{{- $isOne := or (not $types) (has $kind $types) (and (eq $kind "integer") (has "number" $types)) -}}
{{- if not $isOne -}}
{{- $type := first $types -}}
{{- $remedy := printf "write %s" (include "spillway.schemaNeeded" .schema) -}}
{{- if eq $kind "null" -}}{{- $remedy = ternary "write {} for one without settings, or remove the line" "remove the line for the default" (eq $type "object") -}}
{{- else if and (eq $type "string") (eq $kind "boolean") -}}
{{- $remedy = "write a word in quotes (without them YAML reads on, off, yes and no as true or false)" -}}
{{- with .schema.description -}}{{- $remedy = printf "%s: %s" $remedy . -}}{{- end -}}
{{- else if and (eq $type "string") (has $kind (list "integer" "number")) -}}
{{- $remedy = printf "write it in quotes: %q" (include "spillway.number" .value) -}}
{{- if lt (float64 .value) 1000.0 -}}
{{- $remedy = printf "%s, with all its digits (1.0 and 1 are one number to YAML, 1.10 and 1.1 too)" $remedy -}}
{{- end -}}
{{- else if and (eq $type "integer") (eq $kind "number") -}}{{- $remedy = "round it" -}}
{{- else if and (has $type (list "integer" "number")) (eq $kind "string") -}}
{{- if regexMatch "^ *[0-9.]+ *$" .value -}}{{- $remedy = "remove the quotes" -}}
{{- else if regexMatch "^ *[0-9.]+ *[A-Za-z%]+ *$" .value -}}{{- $remedy = "write the number alone, without a unit" -}}
{{- end -}}
{{- else if eq $type "boolean" -}}{{- $remedy = "write true or false, without quotes" -}}
{{- else if eq $type "object" -}}{{- $remedy = "write them below it, each on a line of its own" -}}
{{- else if eq $type "array" -}}{{- $remedy = "write a list: [first, second]" -}}
{{- end -}}
{{- include "spillway.schemaNeeded" .schema }} needed; {{ $remedy }}
{{- end -}}
{{- end -}}

{{/* schema -> the type that it needs, in words. */}}
{{- define "spillway.schemaNeeded" -}}
{{- $types := .type -}}{{- if kindIs "string" $types -}}{{- $types = list $types -}}{{- end -}}
{{- $words := list -}}
{{- range $types -}}
{{- $words = append $words (get (dict "integer" "a whole number" "number" "a number" "string" "text" "boolean" "true or false" "array" "a list" "object" "a map of settings" "null" "null") .) -}}
{{- end -}}
{{- join " or " $words | default "a value" -}}
{{- if and (has "object" $types) .properties }} ({{ keys .properties | sortAlpha | join ", " | trunc 200 }}){{- end -}}
{{- end -}}

{{/* (value, path) -> the value as a message may show it: short, and not at all where a credential may have been pasted. */}}
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

{{/* (whole, path, key, known, isOfKubernetes) -> which setting is meant by a key that there is not. */}}
{{- define "spillway.nearestSetting" -}}
{{- $lower := lower .key -}}
{{- $here := "" -}}
{{- $known := .known | sortAlpha -}}
{{- range $known -}}{{- if eq (lower .) $lower -}}{{- $here = . -}}{{- end -}}{{- end -}}
{{- $elsewhere := "" -}}
{{- if not (or $here .isOfKubernetes) -}}
{{- /* The same key at another place: the one that shares most of its path. */ -}}
{{- $found := dict -}}
{{- include "spillway.settingsNamed" (dict "whole" .whole "schema" .whole "path" "" "name" $lower "found" $found) -}}
{{- $group := regexFind "^engines\\.[^.]+" .path -}}
{{- $most := -1 -}}
{{- range $place := keys $found | sortAlpha -}}
{{- $own := ternary (regexReplaceAll "^engine(\\.|$)" $place (printf "%s${1}" $group)) $place (ne $group "") -}}
{{- $common := 0 -}}{{- $same := true -}}
{{- $parts := splitList "." $.path -}}
{{- range $index, $part := splitList "." $own -}}
{{- if and $same (lt $index (len $parts)) -}}{{- $same = eq $part (index $parts $index) -}}{{- if $same -}}{{- $common = add1 $common -}}{{- end -}}{{- end -}}
{{- end -}}
{{- if gt (int $common) $most -}}{{- $most = int $common -}}{{- $elsewhere = $own -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- $native := dict "counterparts" dict "withoutCounterpart" dict -}}
{{- if regexMatch "^(engine|engines\\.[^.]+)\\.offload$" .path -}}{{- $native = .whole.nativeKeys -}}{{- end -}}
{{- $unsupported := regexMatch "^(engine|engines\\.[^.]+)$" .path | ternary .whole.withoutSupport dict -}}
{{- $near := default (include "spillway.nearestWord" (dict "word" .key "words" $known)) $here -}}
{{- if hasKey $native.counterparts .key -}}
{{- $answer := get $native.counterparts .key -}}
a key of vLLM's own offload connectors; set {{ .path }}.{{ index $answer 0 }}, {{ index $answer 1 }}
{{- else if hasKey $native.withoutCounterpart .key -}}
a key of vLLM's own offload connectors, without one here, as {{ get $native.withoutCounterpart .key }}; remove it
{{- else if hasKey $unsupported .key -}}
{{ get $unsupported .key }}
{{- else if $here -}}did you mean {{ include "spillway.below" (dict "path" .path "key" $here) }}?
{{- else if $elsewhere -}}did you mean {{ $elsewhere }}?
{{- else if $near -}}did you mean {{ include "spillway.below" (dict "path" .path "key" $near) }}?
{{- else -}}{{ ternary "the values" .path (eq .path "") }} may have {{ $known | join ", " }}: remove it, or choose one of them
{{- end -}}
{{- end -}}

{{/* (whole, schema, path, name, found): puts into found the path of every setting of that name, in small letters. */}}
{{- define "spillway.settingsNamed" -}}
{{- $schema := .schema -}}
{{- with get $schema "$ref" -}}{{- $schema = get (get $.whole "$defs") (base .) -}}{{- end -}}
{{- with $schema.allOf -}}{{- include "spillway.settingsNamed" (set (omit $ "schema") "schema" (first .)) -}}{{- end -}}
{{- /* Types of Kubernetes have a title, and no settings of the chart. */ -}}
{{- if not (and .path $schema.title) -}}
{{- range $key, $below := $schema.properties -}}
{{- $at := include "spillway.below" (dict "path" $.path "key" $key) -}}
{{- if eq (lower $key) $.name -}}{{- $_ := set $.found $at true -}}{{- end -}}
{{- include "spillway.settingsNamed" (dict "whole" $.whole "schema" $below "path" $at "name" $.name "found" $.found) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (word, words in order) -> the one of words that differs least, by at most two letters or a third of them (of four letters one, of fewer none); else nothing. */}}
{{- define "spillway.nearestWord" -}}
{{- $word := lower .word -}}
{{- $least := add1 (max (sub (min 5 (len $word)) 3) (div (len $word) 3)) | int -}}
{{- if lt (len $word) 4 -}}{{- $least = 1 -}}{{- end -}}{{- $nearest := "" -}}
{{- range .words -}}
{{- if lt (int (max (sub (len .) (len $word)) (sub (len $word) (len .)))) $least -}}
{{- $distance := include "spillway.distance" (dict "left" $word "right" (lower .)) | int -}}
{{- if lt $distance $least -}}{{- $least = $distance -}}{{- $nearest = . -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- $nearest -}}
{{- end -}}

{{/* (left, right) -> how many letters have to be added, removed or changed (Levenshtein). */}}
{{- define "spillway.distance" -}}
{{- $row := untilStep 0 (int (add1 (len .right))) 1 -}}
{{- $right := splitList "" .right -}}
{{- range $index, $letter := splitList "" .left -}}
{{- $next := list (add1 $index) -}}
{{- range $place, $other := $right -}}
{{- $next = append $next (min (add (index $row $place) (ternary 0 1 (eq $letter $other))) (add1 (index $row (add1 $place))) (add1 (last $next))) -}}
{{- end -}}
{{- $row = $next -}}
{{- end -}}
{{- last $row -}}
{{- end -}}

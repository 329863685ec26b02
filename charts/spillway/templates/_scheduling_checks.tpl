{{/* What the API server refuses, and nodes never run: tolerations, spread, security contexts and scaling. */}}

{{/* (root, engines, problems) */}}
{{- define "spillway.schedulingChecks" -}}
{{- $values := .root.Values -}}{{- $gateway := $values.gateway -}}
{{- $texts := list -}}
{{- $named := dict -}}
{{- range $suffix := list "gateway" "redis" -}}
{{- $_ := set $named $suffix (include "spillway.name" (dict "root" $.root "suffix" $suffix)) -}}
{{- end -}}
{{- $sections := list -}}
{{- range $key := list "gateway" "redis" -}}
{{- $section := get $values $key -}}
{{- $sections = append $sections (dict "path" $key "name" (get $named $key) "section" $section
  "pod" $section.podSecurityContext "container" $section.securityContext) -}}
{{- end -}}
{{- range .engines -}}
{{- $sections = append $sections (dict "path" .path "name" .name "section" .engine
  "pod" .accelerator.podSecurityContext "container" .accelerator.securityContext) -}}
{{- end -}}
{{- range $sections -}}
{{- $path := .path -}}{{- $section := .section -}}{{- $pod := default dict .pod -}}{{- $container := default dict .container -}}
{{- range $index, $toleration := $section.tolerations -}}
{{- $at := printf "%s.tolerations[%d]" $path $index -}}
{{- $operator := default "Equal" $toleration.operator -}}
{{- if and (eq $operator "Exists") $toleration.value -}}
{{- $texts = append $texts (printf "%s.value: %q given, but operator: Exists takes none; remove it, or set operator: Equal" $at $toleration.value) -}}
{{- end -}}
{{- if and (ne $operator "Exists") (not $toleration.key) -}}
{{- $texts = append $texts (printf "%s.key: nothing given, a taint's key needed by operator: %s; add it, or set operator: Exists for all taints" $at $operator) -}}
{{- end -}}
{{- if and (has $operator (list "Lt" "Gt")) (not (regexMatch "^-?[0-9]+$" (toString $toleration.value))) -}}
{{- $texts = append $texts (printf "%s.value: %q given, a whole number needed by operator: %s; write one, or set operator: Equal" $at (toString (default "" $toleration.value)) $operator) -}}
{{- end -}}
{{- if and (has $operator (list "Lt" "Gt")) (semverCompare "<1.35-0" $.root.Capabilities.KubeVersion.Version) -}}
{{- $texts = append $texts (printf "%s.operator: %s given, but Kubernetes %s does not have it, which came with 1.35; set Exists or Equal" $at $operator (regexFind "[0-9]+[.][0-9]+" $.root.Capabilities.KubeVersion.Version)) -}}
{{- end -}}
{{- if and (not (kindIs "invalid" $toleration.tolerationSeconds)) (ne (toString $toleration.effect) "NoExecute") -}}
{{- $texts = append $texts (printf "%s.tolerationSeconds: %v given, but only effect: NoExecute has them; set that effect, or remove them" $at $toleration.tolerationSeconds) -}}
{{- end -}}
{{- end -}}
{{- $spread := dict -}}
{{- if and $section.topologySpread (default dict $section.topologySpread).enabled -}}
{{- $_ := set $spread (printf "%s %s" $section.topologySpread.topologyKey $section.topologySpread.whenUnsatisfiable) (printf "%s.topologySpread" $path) -}}
{{- end -}}
{{- range $index, $constraint := $section.topologySpreadConstraints -}}
{{- $key := printf "%s %s" $constraint.topologyKey $constraint.whenUnsatisfiable -}}
{{- if hasKey $spread $key -}}
{{- $texts = append $texts (printf "%s.topologySpreadConstraints[%d]: topologyKey and whenUnsatisfiable are those of %s, and Kubernetes takes such a pair once; remove one" $path $index (get $spread $key)) -}}
{{- end -}}
{{- $_ := set $spread $key (printf "topologySpreadConstraints[%d]" $index) -}}
{{- end -}}
{{- $user := $container.runAsUser -}}{{- if kindIs "invalid" $user -}}{{- $user = $pod.runAsUser -}}{{- end -}}
{{- $nonRoot := $container.runAsNonRoot -}}{{- if kindIs "invalid" $nonRoot -}}{{- $nonRoot = $pod.runAsNonRoot -}}{{- end -}}
{{- if and $nonRoot (not (kindIs "invalid" $user)) (eq (int64 $user) 0) -}}
{{- $texts = append $texts (printf "%s.podSecurityContext: runAsNonRoot: true, but runAsUser: 0 is root, so kubelet would start no container; set another user, or runAsNonRoot: false" $path) -}}
{{- end -}}
{{- if eq (toString $container.allowPrivilegeEscalation) "false" -}}
{{- if $container.privileged -}}
{{- $texts = append $texts (printf "%s.securityContext: privileged: true with allowPrivilegeEscalation: false is refused by Kubernetes; set allowPrivilegeEscalation: true, or remove privileged" $path) -}}
{{- else if has "SYS_ADMIN" (default list (default dict $container.capabilities).add) -}}
{{- $texts = append $texts (printf "%s.securityContext: capability SYS_ADMIN with allowPrivilegeEscalation: false is refused by Kubernetes; set allowPrivilegeEscalation: true, or remove SYS_ADMIN" $path) -}}
{{- end -}}
{{- end -}}
{{- $budget := $section.podDisruptionBudget -}}
{{- if and $budget (default dict $budget).enabled -}}
{{- $scaling := $section.autoscaling -}}
{{- $most := ternary $scaling.maxReplicas $section.replicas $scaling.enabled | int64 -}}
{{- $given := $budget.maxUnavailable -}}
{{- $taken := 0 -}}
{{- /* Kubernetes rounds a share of the pods up. */ -}}
{{- if kindIs "string" $given -}}{{- $taken = div (add (mul (trimSuffix "%" $given | int64) $most) 99) 100 -}}
{{- else -}}{{- $taken = int64 $given -}}
{{- end -}}
{{- if and (ge $taken $most) (gt $most 1) -}}
{{- $texts = append $texts (printf
  "%s.podDisruptionBudget.maxUnavailable: %v given, but there are at most %d pods, so that a drain may take all at once; set 1, or enabled: false"
  $path (include "spillway.number" $given) $most) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $gateway.autoscaling.enabled (not $gateway.resources.requests.cpu) -}}
{{- $texts = append $texts "gateway.resources.requests.cpu: null given, but gateway.autoscaling.cpuPercent is a share of it; set it, e.g. \"1\"" -}}
{{- end -}}
{{- /* Those of the chart's own names first, so that the message is about the one that was given. */ -}}
{{- $accounts := dict -}}
{{- range $isGiven := list false true -}}
{{- range $sections -}}
{{- $account := .section.serviceAccount -}}
{{- if and $account.create (eq $isGiven (ne (default "" $account.name) "")) (or (ne .path "redis")
  $values.redis.enabled) -}}
{{- $name := default .name $account.name -}}
{{- if hasKey $accounts $name -}}
{{- $texts = append $texts (printf
  "%s.serviceAccount.name: %s is made by %s too, and one object cannot be made twice; set create: false here" .path
  $name (get $accounts $name)) -}}
{{- end -}}
{{- $_ := set $accounts $name .path -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $texts -}}{{- include "spillway.problem" (dict "problems" $.problems "text" .) -}}{{- end -}}
{{- end -}}

{{/* Ways into the cluster, out of it and to the metrics: Service, Ingress, HTTPRoute, NetworkPolicy peers, monitors. */}}

{{/* (root, problems) */}}
{{- define "spillway.routeChecks" -}}
{{- $values := .root.Values -}}{{- $gateway := $values.gateway -}}
{{- $texts := list -}}
{{- $address := "^[0-9]+\\.[0-9]+\\.[0-9]+\\.[0-9]+$" -}}
{{- with $gateway.ingress -}}
{{- if .enabled -}}
{{- $rules := include "spillway.ingressRules" . | fromYamlArray -}}
{{- $hosts := list -}}{{- $seen := dict -}}
{{- range $rules -}}
{{- $rule := printf "%s%s" .host .path -}}
{{- if hasKey $seen $rule -}}
{{- $texts = append $texts (printf "gateway.ingress: %s is there twice; remove one" $rule) -}}
{{- end -}}
{{- $_ := set $seen $rule true -}}
{{- $hosts = append $hosts .host -}}
{{- if regexMatch $address .host -}}
{{- $texts = append $texts (printf "gateway.ingress: %s is an address, and an Ingress takes names alone; write a DNS name, or leave host empty for all" .host) -}}
{{- end -}}
{{- end -}}
{{- $says :=
  "(?i)backend-?(protocol|ssl|tls|config)|app-?protocol|serversscheme|serverstransport|server-ssl|secure-backend|passthrough" -}}
{{- $speaksTls := false -}}
{{- range $key, $_ := merge (deepCopy .annotations) $gateway.service.annotations -}}
{{- $speaksTls = or $speaksTls (regexMatch $says $key) -}}
{{- end -}}
{{- if and $gateway.tls.secret.name (not $speaksTls) -}}
{{- $texts = append $texts (printf
  "gateway.tls.secret.name: %s, but the Ingress would speak plain HTTP to the gateway, and every request fail; %s, or %s"
  $gateway.tls.secret.name
  "set your controller's annotation, such as gateway.ingress.annotations: {nginx.ingress.kubernetes.io/backend-protocol: HTTPS}"
  "remove gateway.tls, so that TLS ends at the Ingress (gateway.ingress.tlsSecret)") -}}
{{- end -}}
{{- range $index, $certificate := .tls -}}
{{- range $certificate.hosts -}}
{{- if not (has . $hosts) -}}
{{- $texts = append $texts (printf "gateway.ingress.tls[%d].hosts: %s is no host of this Ingress; add it to gateway.ingress.hosts, or correct it" $index .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $gateway.httpRoute -}}
{{- range $index, $host := .hostnames -}}
{{- if regexMatch $address $host -}}
{{- $texts = append $texts (printf "gateway.httpRoute.hostnames[%d]: %s is an address, and a route takes names alone; write a DNS name, or none for all" $index $host) -}}
{{- end -}}
{{- end -}}
{{- if and .enabled .requestTimeoutSeconds (lt (float64 .requestTimeoutSeconds) (float64
  $gateway.timeouts.plainSeconds)) -}}
{{- $texts = append $texts (printf
  "gateway.httpRoute.requestTimeoutSeconds: %v ends answers that gateway.timeouts.plainSeconds: %v still waits for; set the first to 0 (no bound) or raise it, or lower the second"
  .requestTimeoutSeconds $gateway.timeouts.plainSeconds) -}}
{{- end -}}
{{- end -}}
{{- with $gateway.tls.secret -}}
{{- if and .name (eq .certificateKey .privateKeyKey) -}}
{{- $texts = append $texts (printf "gateway.tls.secret: certificateKey and privateKeyKey are both %s; name the entry of each, e.g. tls.crt and tls.key" .certificateKey) -}}
{{- end -}}
{{- end -}}
{{- with $gateway.service -}}
{{- if and (not (has .ipFamilyPolicy (list "PreferDualStack" "RequireDualStack"))) (gt (len .ipFamilies) 1) -}}
{{- $texts = append $texts (printf "gateway.service.ipFamilies: %s given, but ipFamilyPolicy: %s has one; remove one, or set PreferDualStack" (join ", " .ipFamilies) (default "null" .ipFamilyPolicy)) -}}
{{- end -}}
{{- end -}}
{{- if hasPrefix "svc." $values.clusterDomain -}}
{{- $texts = append $texts (printf "clusterDomain: %q begins with svc., which names of Services have before it; write %s" $values.clusterDomain (trimPrefix "svc." $values.clusterDomain)) -}}
{{- end -}}
{{- $policy := $values.networkPolicy -}}
{{- $peers := dict "gatewayFrom" $policy.gatewayFrom "prometheusFrom" $policy.prometheusFrom -}}
{{- range $kind := list "engineEgress" "gatewayEgress" -}}
{{- range $index, $rule := get $policy $kind -}}{{- $_ := set $peers (printf "%s[%d].to" $kind $index) (default list $rule.to) -}}{{- end -}}
{{- end -}}
{{- range $at, $list := $peers -}}
{{- range $index, $peer := $list -}}
{{- if not $peer -}}
{{- $texts = append $texts (printf "networkPolicy.%s[%d]: an empty peer given; name podSelector, namespaceSelector or ipBlock, or {podSelector: {}} for every pod here" $at $index) -}}
{{- else if and $peer.ipBlock (gt (len $peer) 1) -}}
{{- $texts = append $texts (printf "networkPolicy.%s[%d]: ipBlock stands alone in a peer; make the selectors another entry" $at $index) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $values.monitoring.podMonitor.enabled $policy.enabled (not $policy.prometheusFrom) -}}
{{- $texts = append $texts "monitoring.podMonitor.enabled: true, but networkPolicy.prometheusFrom is empty, so that no Prometheus reaches the engines' metrics; name its pods there, or set networkPolicy.enabled: false" -}}
{{- end -}}
{{- if and $values.monitoring.alerts.enabled (not $values.monitoring.serviceMonitor.enabled) -}}
{{- $texts = append $texts (printf
  "monitoring.alerts.enabled: true, but serviceMonitor.enabled is false, so that Prometheus %s; %s"
  "has no series of the gateway under the name that alerts select by, and SpillwayGatewayDown would never stop firing"
  "set monitoring.serviceMonitor.enabled: true (podMonitor too, for alerts about engines), or alerts.enabled: false") -}}
{{- end -}}
{{- range $key, $_ := $values.commonAnnotations -}}
{{- if or (hasPrefix "helm.sh/hook" $key) (eq $key "helm.sh/resource-policy") -}}
{{- $texts = append $texts (printf "commonAnnotations: %s would make Helm treat every object otherwise than as a part of the release; remove it" $key) -}}
{{- end -}}
{{- end -}}
{{- range $name := list "podMonitor" "serviceMonitor" -}}
{{- $monitor := get $values.monitoring $name -}}
{{- range $kind := list "relabelings" "metricRelabelings" -}}
{{- range $index, $rule := get $monitor $kind -}}
{{- $at := printf "monitoring.%s.%s[%d]" $name $kind $index -}}
{{- $action := lower (default "replace" $rule.action) -}}
{{- $needed := get (dict "replace" (list "targetLabel") "hashmod" (list "targetLabel" "modulus") "lowercase" (list "targetLabel" "sourceLabels") "uppercase" (list "targetLabel" "sourceLabels") "keepequal" (list "targetLabel" "sourceLabels") "dropequal" (list "targetLabel" "sourceLabels") "labeldrop" (list "regex") "labelkeep" (list "regex") "labelmap" (list "regex")) $action | default list -}}
{{- range $field := $needed -}}
{{- if not (get $rule $field) -}}
{{- $texts = append $texts (printf "%s.%s: nothing given, and action: %s needs it, or the operator refuses the whole monitor; add it" $at $field $action) -}}
{{- end -}}
{{- end -}}
{{- if has $action (list "labeldrop" "labelkeep") -}}
{{- range $field := list "sourceLabels" "targetLabel" "replacement" "separator" "modulus" -}}
{{- if hasKey $rule $field -}}
{{- $texts = append $texts (printf "%s.%s: given, but action: %s takes regex alone, which it holds against labels' names; remove it, or set action: drop or keep" $at $field $action) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $values.monitoring.alerts.enabled (or (eq (toString $rule.targetLabel) "job") (and (eq $action "labelkeep") (not (regexMatch (printf "^(?:%s)$" (default "" $rule.regex)) "job")))) -}}
{{- $texts = append $texts (printf "%s: action: %s changes the label job, which the alerts select by; leave job as it is, or set monitoring.alerts.enabled: false" $at $action) -}}
{{- end -}}
{{- if not (regexMatch (printf "(?:%s)|" (default "" $rule.regex)) "") -}}
{{- $texts = append $texts (printf "%s.regex: %q is no regular expression (RE2); correct it" $at $rule.regex) -}}
{{- else if and $values.monitoring.alerts.enabled (eq (lower (toString $rule.action)) "labeldrop") (regexMatch (printf "^(?:%s)$" (default "" $rule.regex)) "job") -}}
{{- $texts = append $texts (printf "%s.regex: %q drops the label job, which the alerts select by; leave it out, or set monitoring.alerts.enabled: false" $at $rule.regex) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $texts -}}{{- include "spillway.problem" (dict "problems" $.problems "text" .) -}}{{- end -}}
{{- end -}}

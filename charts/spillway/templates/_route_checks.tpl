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
{{- if and .enabled (lt (float64 .requestTimeoutSeconds) (float64 $gateway.timeouts.plainSeconds)) -}}
{{- $texts = append $texts (printf "gateway.httpRoute.requestTimeoutSeconds: %v ends answers that gateway.timeouts.plainSeconds: %v still waits for; raise the first or lower the second" .requestTimeoutSeconds $gateway.timeouts.plainSeconds) -}}
{{- end -}}
{{- end -}}
{{- with $gateway.tls.secret -}}
{{- if and .name (eq .certificateKey .privateKeyKey) -}}
{{- $texts = append $texts (printf "gateway.tls.secret: certificateKey and privateKeyKey are both %s; name the entry of each, e.g. tls.crt and tls.key" .certificateKey) -}}
{{- end -}}
{{- end -}}
{{- with $gateway.service -}}
{{- if and (eq (toString .ipFamilyPolicy) "SingleStack") (gt (len .ipFamilies) 1) -}}
{{- $texts = append $texts (printf "gateway.service.ipFamilies: %s given, but ipFamilyPolicy: SingleStack has one; remove one, or set PreferDualStack" (join ", " .ipFamilies)) -}}
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
{{- range $name := list "podMonitor" "serviceMonitor" -}}
{{- $monitor := get $values.monitoring $name -}}
{{- range $kind := list "relabelings" "metricRelabelings" -}}
{{- range $index, $rule := get $monitor $kind -}}
{{- $at := printf "monitoring.%s.%s[%d]" $name $kind $index -}}
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

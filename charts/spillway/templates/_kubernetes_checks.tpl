{{/* Contradictions in what the values say to Kubernetes: the Service, the network and the resources of pods. */}}

{{/* (root, engines, problems) */}}
{{- define "spillway.kubernetesChecks" -}}
{{- $service := .root.Values.gateway.service -}}
{{- $texts := list -}}
{{- if and $service.externalTrafficPolicy (eq $service.type "ClusterIP") -}}
{{- $texts = append $texts (printf "gateway.service.externalTrafficPolicy: %s needs type: NodePort or LoadBalancer; it is ClusterIP" $service.externalTrafficPolicy) -}}
{{- end -}}
{{- if ne $service.type "LoadBalancer" -}}
{{- range $key := list "loadBalancerClass" "loadBalancerSourceRanges" -}}
{{- with get $service $key -}}
{{- $texts = append $texts (printf "gateway.service.%s: %v needs type: LoadBalancer; it is %s" $key . $service.type) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $key := list "engineEgress" "gatewayEgress" -}}
{{- range $index, $rule := get $.root.Values.networkPolicy $key -}}
{{- range $place, $port := $rule.ports -}}
{{- if and $port.endPort (lt (int64 $port.endPort) (int64 $port.port)) -}}
{{- $texts = append $texts (printf "networkPolicy.%s[%d].ports[%d].endPort: %d given, at least port: %d needed; raise it"
  $key $index $place (int64 $port.endPort) (int64 $port.port)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $item := .engines -}}
{{- $engine := $item.engine -}}{{- $path := $item.path -}}
{{- with $item.accelerator.resourceName -}}
{{- if hasKey $engine.accelerator.extraResources . -}}
{{- $texts = append $texts (printf "%s.accelerator.extraResources: %s is resourceName, whose amount is accelerator.count; remove it here" $path .) -}}
{{- end -}}
{{- end -}}
{{- if and $engine.hostNetwork (eq (toString $engine.dnsPolicy) "ClusterFirst") -}}
{{- $texts = append $texts (printf "%s.dnsPolicy: ClusterFirst with hostNetwork: true leaves a pod without the cluster's names; set ClusterFirstWithHostNet, or null" $path) -}}
{{- end -}}
{{- range $name, $amount := $engine.accelerator.extraResources -}}
{{- if hasPrefix "hugepages-" $name -}}
{{- $page := int64 (include "spillway.readSize" (trimPrefix "hugepages-" $name)) -}}
{{- if mod (int64 (include "spillway.readSize" $amount)) $page -}}
{{- $texts = append $texts (printf "%s.accelerator.extraResources.%s: %v is no whole number of pages; write their sum, such as %dMi" $path $name $amount (max 1 (div (mul $page 2) 1048576))) -}}
{{- end -}}
{{- else if regexMatch "(^|\\.)kubernetes\\.io/" $name -}}
{{- $texts = append $texts (printf "%s.accelerator.extraResources: %s is no extended resource, as kubernetes.io is Kubernetes' own; write the name that kubectl describe node shows" $path $name) -}}
{{- end -}}
{{- end -}}
{{- $kernel := dict -}}
{{- range (default dict $item.accelerator.podSecurityContext).sysctls -}}
{{- $name := replace "/" "." .name -}}
{{- if hasKey $kernel $name -}}{{- $texts = append $texts (printf "%s.podSecurityContext.sysctls: %s is given twice; keep one" $path .name) -}}{{- end -}}
{{- $_ := set $kernel $name true -}}
{{- end -}}
{{- if $engine.hostNetwork -}}
{{- range (default dict $item.accelerator.podSecurityContext).sysctls -}}
{{- if hasPrefix "net." (replace "/" "." .name) -}}
{{- $texts = append $texts (printf "%s.podSecurityContext.sysctls: %s is of the pod's own network, and hostNetwork: true has none; set it on the node, or remove one of the two" $path .name) -}}
{{- end -}}
{{- end -}}
{{- range $kind := list "sidecars" "initContainers" -}}
{{- range $index, $container := get $engine $kind -}}
{{- range $container.ports -}}
{{- if and .hostPort (ne (int64 .hostPort) (int64 .containerPort)) -}}
{{- $texts = append $texts (printf "%s.%s[%d].ports: hostPort: %d given, but with hostNetwork: true it is containerPort: %d; give both the same, or remove hostPort" $path $kind $index (int64 .hostPort) (int64 .containerPort)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $engine.autoscaling -}}
{{- if and .enabled (eq (int64 .minReplicas) 0) (ne .trigger "gateway") -}}
{{- $texts = append $texts (printf "%s.autoscaling.minReplicas: 0 with trigger: engines never starts an engine again, as only engines report waiting requests; set trigger: gateway, or minReplicas: 1" $path) -}}
{{- end -}}
{{- if and .wakeTimeoutSeconds (not (and .enabled (eq (int64 .minReplicas) 0))) -}}
{{- $texts = append $texts (printf "%s.autoscaling.wakeTimeoutSeconds: %v is about a model without a pod; set autoscaling.enabled: true and minReplicas: 0, or null here" $path .wakeTimeoutSeconds) -}}
{{- end -}}
{{- end -}}
{{- with $engine.ephemeralStorage -}}
{{- if .limit -}}
{{- $limit := int64 (include "spillway.bytes" (dict "value" .limit "path" (printf "%s.ephemeralStorage.limit" $path))) -}}
{{- $request := int64 (include "spillway.bytes" (dict "value" (default 0 .request) "path" (printf "%s.ephemeralStorage.request" $path))) -}}
{{- if gt $request $limit -}}
{{- $texts = append $texts (printf "%s.ephemeralStorage: request %v is more than limit %v; raise the limit, or lower the request" $path .request .limit) -}}
{{- end -}}
{{- $volume := $engine.offload.sharedTier.nvme.volume -}}
{{- if and (include "spillway.usesNvme" $item) (eq $volume.type "emptyDir") -}}
{{- $tier := int64 (include "spillway.bytes" (dict "value" $volume.size "path" (printf "%s.offload.sharedTier.nvme.volume.size" $path))) -}}
{{- if lt $limit $tier -}}
{{- $texts = append $texts (printf "%s.ephemeralStorage.limit: %v is less than offload.sharedTier.nvme.volume.size: %v, whose emptyDir counts against it, so kubelet would evict the pod; raise the limit, or set it to null" $path .limit $volume.size) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $texts -}}{{- include "spillway.problem" (dict "problems" $.problems "text" .) -}}{{- end -}}
{{- end -}}

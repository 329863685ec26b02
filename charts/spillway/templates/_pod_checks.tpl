{{/* What Kubernetes would refuse of a pod only after an install began: one name, path or label twice, a request above its
limit, a port that its user may not open. */}}

{{/* (root, engines, problems) */}}
{{- define "spillway.podChecks" -}}
{{- $root := .root -}}{{- $values := $root.Values -}}{{- $problems := .problems -}}
{{- $texts := list -}}
{{- $full := include "spillway.fullname" $root -}}
{{- if not (regexMatch "^[a-z]" $full) -}}
{{- $texts = append $texts (printf
  "fullnameOverride: the names of all objects begin with %q, and a Service's has to begin with a letter; set fullnameOverride, e.g. spillway-%s"
  $full ($root.Release.Name | replace "." "-")) -}}
{{- else if not (regexMatch "^[-a-z0-9]*$" $full) -}}
{{- $texts = append $texts (printf
  "fullnameOverride: the names of all objects begin with %q, and a Service's may hold %s; set fullnameOverride, e.g. %s"
  $full "small letters, digits and dashes alone, no dot" (regexReplaceAll "[^-a-z0-9]" $full "-")) -}}
{{- end -}}
{{- $labels := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" "app.kubernetes.io/part-of" "spillway/engine" "spillway/vllm" -}}
{{- range $key := concat $labels (list "app.kubernetes.io/version" "app.kubernetes.io/managed-by" "helm.sh/chart") -}}
{{- if hasKey $values.commonLabels $key -}}{{- $texts = append $texts (printf "commonLabels: %s is set by the chart; remove it" $key) -}}{{- end -}}
{{- end -}}
{{- $monitoring := $values.monitoring -}}
{{- $own := dict "gateway.service.labels" $values.gateway.service.labels "monitoring.podMonitor.labels" $monitoring.podMonitor.labels "monitoring.serviceMonitor.labels" $monitoring.serviceMonitor.labels "monitoring.alerts.labels" $monitoring.alerts.labels "monitoring.dashboards.labels" $monitoring.dashboards.labels -}}
{{- $pods := list (list "gateway" $values.gateway "gateway") (list "redis" $values.redis "valkey") -}}
{{- range .engines -}}{{- $pods = append $pods (list .path .engine "engine") -}}{{- end -}}
{{- range $pods -}}{{- $_ := set $own (printf "%s.podLabels" (index . 0)) (index . 1).podLabels -}}{{- end -}}
{{- range $path, $given := $own -}}
{{- range $key, $_ := $given -}}
{{- if or (has $key $labels) (hasPrefix "app.kubernetes.io/" $key) -}}{{- $texts = append $texts (printf "%s: %s is set by the chart; remove it" $path $key) -}}
{{- else if hasKey $values.commonLabels $key -}}{{- $texts = append $texts (printf "%s: %s is in commonLabels too; give it once" $path $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $pods -}}
{{- $path := index . 0 -}}{{- $section := index . 1 -}}
{{- range $key := list "checksum/config" "spillway/secrets-revision" "kubectl.kubernetes.io/default-container" -}}
{{- if hasKey $section.podAnnotations $key -}}{{- $texts = append $texts (printf "%s.podAnnotations: %s is set by the chart; remove it" $path $key) -}}{{- end -}}
{{- end -}}
{{- $names := dict (index . 2) "the chart's own container" -}}
{{- range $kind := list "initContainers" "sidecars" -}}
{{- range $index, $container := get $section $kind -}}
{{- if hasKey $names $container.name -}}{{- $texts = append $texts (printf "%s.%s[%d].name: %s is %s; choose another name" $path $kind $index $container.name (get $names $container.name)) -}}{{- end -}}
{{- $_ := set $names $container.name (printf "the name of %s[%d] too" $kind $index) -}}
{{- end -}}
{{- end -}}
{{- $given := dict -}}
{{- range $index, $volume := $section.extraVolumes -}}
{{- if hasKey $given $volume.name -}}{{- $texts = append $texts (printf "%s.extraVolumes: %s is listed twice; give each volume its own name" $path $volume.name) -}}{{- end -}}
{{- $_ := set $given $volume.name true -}}
{{- if eq (len $volume) 1 -}}{{- $texts = append $texts (printf "%s.extraVolumes: %s has no source; add one, e.g. emptyDir: {} or hostPath: {path: /data}" $path $volume.name) -}}{{- end -}}
{{- end -}}
{{- $mounted := dict -}}
{{- range $section.extraVolumeMounts -}}
{{- $folder := trimSuffix "/" .mountPath -}}
{{- if hasKey $mounted $folder -}}{{- $texts = append $texts (printf "%s.extraVolumeMounts: %s is given twice; mount each volume at a folder of its own" $path .mountPath) -}}{{- end -}}
{{- $_ := set $mounted $folder true -}}
{{- if has $folder (include "spillway.ownFolders" . | fromYamlArray) -}}
{{- $texts = append $texts (printf "%s.extraVolumeMounts: %s is a folder of the chart's own; mount %s elsewhere" $path .mountPath .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $cpus := list (list "gateway.resources" "requests.cpu" $values.gateway.resources.requests.cpu "limits.cpu" $values.gateway.resources.limits.cpu) (list "redis.cpu" "request" $values.redis.cpu.request "limit" $values.redis.cpu.limit) -}}
{{- range $item := .engines -}}
{{- range $key, $given := pick $item.engine.cpu "request" "limit" -}}
{{- if $given -}}
{{- if lt (include "spillway.milliCores" $given | float64) 20.0 -}}
{{- $texts = append $texts (printf "%s.cpu.%s: %v given, at least 20m needed; whole cores have no unit: write \"8\"" $item.path $key $given) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range .engines -}}{{- $cpus = append $cpus (list (printf "%s.cpu" .path) "request" .engine.cpu.request "limit" .engine.cpu.limit) -}}{{- end -}}
{{- range $key, $given := pick $values.redis.cpu "request" "limit" -}}
{{- if $given -}}
{{- if lt (include "spillway.milliCores" $given | float64) 20.0 -}}
{{- $texts = append $texts (printf "redis.cpu.%s: %v given, at least 20m needed; whole cores have no unit: write \"1\"" $key $given) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $cpus -}}
{{- $request := index . 2 -}}{{- $limit := index . 4 -}}
{{- if and $request $limit -}}
{{- if gt (include "spillway.milliCores" $request | float64) (include "spillway.milliCores" $limit | float64) -}}
{{- $texts = append $texts (printf "%s: %s %v is more than %s %v; lower the first or raise the second" (index . 0) (index . 1) $request (index . 3) $limit) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $ports := list -}}
{{- $gateway := $values.gateway -}}
{{- if not (include "spillway.opensLowPorts" (dict "pod" $gateway.podSecurityContext "container" $gateway.securityContext)) -}}
{{- $ports = append $ports (list "gateway.port" $gateway.port "gateway.service.port may stay below") -}}{{- $ports = append $ports (list "gateway.opsPort" (default 1024 $gateway.opsPort) "e.g. 8001") -}}
{{- end -}}
{{- $contexts := dict "pod" $values.redis.podSecurityContext "container" $values.redis.securityContext -}}
{{- if and $values.redis.enabled (not (include "spillway.opensLowPorts" $contexts)) -}}
{{- $ports = append $ports (list "redis.port" $values.redis.port "e.g. 6379") -}}
{{- end -}}
{{- range .engines -}}
{{- if not (include "spillway.opensLowPorts" (dict "pod" .accelerator.podSecurityContext "container" .accelerator.securityContext)) -}}
{{- $ports = append $ports (list (printf "%s.port" .path) .engine.port "e.g. 8100") -}}
{{- end -}}
{{- end -}}
{{- range $ports -}}
{{- if lt (int64 (index . 1)) 1024 -}}
{{- $texts = append $texts (printf "%s: %d is below 1024, which a process that is not root may not open on every node; set 1024 or more (%s)" (index . 0) (int64 (index . 1)) (index . 2)) -}}
{{- end -}}
{{- end -}}
{{- $objects := dict -}}
{{- $chartNames := list (include "spillway.fullname" $root) -}}
{{- range $suffix := list "gateway" "redis" -}}{{- $chartNames = append $chartNames (include "spillway.name" (dict "root" $root "suffix" $suffix)) -}}{{- end -}}
{{- range .engines -}}{{- $chartNames = concat $chartNames (list .name .headless) -}}{{- end -}}
{{- range $index, $object := $values.extraObjects -}}
{{- $name := printf "%s %s" $object.kind $object.metadata.name -}}
{{- if hasKey $objects $name -}}{{- $texts = append $texts (printf "extraObjects[%d]: %s is there twice; rename or remove one" $index $name) -}}{{- end -}}
{{- $_ := set $objects $name true -}}
{{- if not (or (contains "{{" $object.metadata.name) (regexMatch "^[a-z0-9]([-a-z0-9.:]*[a-z0-9])?$" $object.metadata.name)) -}}
{{- $texts = append $texts (printf "extraObjects[%d].metadata.name: %q given, the name of an object (small letters, digits, dashes and dots) needed; correct it" $index $object.metadata.name) -}}
{{- end -}}
{{- if has $object.metadata.name $chartNames -}}
{{- $texts = append $texts (printf "extraObjects[%d].metadata.name: %s is a name of the chart's own objects; choose another" $index $object.metadata.name) -}}
{{- end -}}
{{- $plain := dict "metadata.labels" $object.metadata.labels "metadata.annotations" $object.metadata.annotations -}}
{{- if eq $object.kind "ConfigMap" -}}{{- $_ := set $plain "data" $object.data -}}{{- end -}}
{{- if eq $object.kind "Secret" -}}{{- $_ := set $plain "data" $object.data -}}{{- $_ = set $plain "stringData" $object.stringData -}}{{- end -}}
{{- range $part, $map := $plain -}}
{{- range $key, $value := default dict $map -}}
{{- if not (kindIs "string" $value) -}}
{{- $texts = append $texts (printf "extraObjects[%d].%s.%s: %s given, text needed; write it in quotes" $index $part $key (include "spillway.given" (dict "value" $value "path" (ternary "secret" "" (eq $object.kind "Secret"))))) -}}
{{- else if and (eq $object.kind "Secret") (eq $part "data") (not (contains "{{" $value)) (not (regexMatch "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$" (regexReplaceAll "\\s" $value ""))) -}}
{{- $texts = append $texts (printf "extraObjects[%d].data.%s: text of %d characters given that is no base64; write it below stringData, as it is" $index $key (len $value)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $pulled := dict -}}
{{- range $values.image.pullSecrets -}}
{{- if hasKey $pulled .name -}}{{- $texts = append $texts "image.pullSecrets: one Secret is listed twice; remove one" -}}{{- end -}}
{{- $_ := set $pulled .name true -}}
{{- end -}}
{{- range $texts -}}{{- include "spillway.problem" (dict "problems" $problems "text" .) -}}{{- end -}}
{{- end -}}

{{/* cores as Kubernetes writes them -> thousandths. */}}
{{- define "spillway.milliCores" -}}
{{- $text := toString . -}}
{{- if hasSuffix "m" $text -}}{{ trimSuffix "m" $text }}{{- else -}}{{ mulf (float64 $text) 1000 }}{{- end -}}
{{- end -}}

{{/* (pod, container): their securityContexts -> may their user open ports below 1024? */}}
{{- define "spillway.opensLowPorts" -}}
{{- $pod := default dict .pod -}}{{- $container := default dict .container -}}
{{- $added := list -}}{{- with $container.capabilities -}}{{- $added = default list .add -}}{{- end -}}
{{- $user := default (default 0 $pod.runAsUser) $container.runAsUser -}}
{{- if or (eq (int64 $user) 0) $pod.sysctls $container.privileged (has "NET_BIND_SERVICE" $added) -}}true{{- end -}}
{{- end -}}

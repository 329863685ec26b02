{{/* Volumes, mounts and containers of a pod, the chart's own and those that values add, held against each other. */}}

{{/* (root, engines, problems) */}}
{{- define "spillway.containerChecks" -}}
{{- $root := .root -}}{{- $values := $root.Values -}}{{- $gateway := $values.gateway -}}
{{- $tokenizers := include "spillway.tokenizerVolumes" (dict "engines" .engines) | fromYamlArray -}}
{{- $gatewayVolumes := list "config" "scratch" "secrets" -}}
{{- range $tokenizers -}}{{- $gatewayVolumes = append $gatewayVolumes .name -}}{{- end -}}
{{- $gatewayPorts := dict "http" (int64 $gateway.port) -}}
{{- if $gateway.opsPort -}}{{- $_ := set $gatewayPorts "ops" (int64 $gateway.opsPort) -}}{{- end -}}
{{- $pods := list
  (dict "path" "gateway" "section" $gateway "volumes" $gatewayVolumes "ports" $gatewayPorts "mounts" $tokenizers "privileged" (default dict $gateway.securityContext).privileged)
  (dict "path" "redis" "section" $values.redis "volumes" (list "config" "scratch") "ports" (dict "redis" (int64 $values.redis.port)) "mounts" list)
-}}
{{- $texts := list -}}
{{- range $item := .engines -}}
{{- $own := set (omit $item "engine") "engine" (omit $item.engine "extraVolumes" "extraVolumeMounts") -}}
{{- $mounts := include "spillway.engineMounts" (dict "root" $root "item" $own) | fromYamlArray -}}
{{- $names := list -}}{{- range $mounts -}}{{- $names = append $names .name -}}{{- end -}}
{{- $ports := dict "http" (int64 $item.engine.port) -}}
{{- range include "spillway.eventPorts" $item.engine | fromYamlArray -}}{{- $_ := set $ports .name (int64 .port) -}}{{- end -}}
{{- $pods = append $pods (dict "path" $item.path "section" $item.engine "volumes" $names "ports" $ports "mounts" $mounts "privileged" (default dict $item.accelerator.securityContext).privileged) -}}
{{- $texts = concat $texts (include "spillway.mountProblems" (dict "path" $item.path "mounts" $mounts) | fromYamlArray) -}}
{{- end -}}
{{- range $pods -}}
{{- $path := .path -}}{{- $section := .section -}}{{- $ports := .ports -}}
{{- $volumes := .volumes -}}{{- range $section.extraVolumes -}}{{- $volumes = append $volumes .name -}}{{- end -}}
{{- $privileged := default false .privileged -}}
{{- $readOnly := list "/etc/spillway" "/etc/valkey" "/var/lib/spillway/secrets" -}}{{- range .mounts -}}{{- if .readOnly -}}{{- $readOnly = append $readOnly (trimSuffix "/" .mountPath) | uniq -}}{{- end -}}{{- end -}}
{{- $folders := dict -}}{{- range .mounts -}}{{- $_ := set $folders (trimSuffix "/" .mountPath) .name -}}{{- end -}}
{{- range $section.extraVolumeMounts -}}
{{- if not (has .name $volumes) -}}
{{- $texts = append $texts (printf "%s.extraVolumeMounts: %s at %s is no volume of the pod; add it to extraVolumes, or correct the name" $path .name .mountPath) -}}
{{- end -}}
{{- if and (hasKey $folders (trimSuffix "/" .mountPath)) (not (has (trimSuffix "/" .mountPath) (include "spillway.ownFolders" . | fromYamlArray))) -}}
{{- $texts = append $texts (printf "%s.extraVolumeMounts: at %s the chart mounts %s; mount %s elsewhere" $path .mountPath (get $folders (trimSuffix "/" .mountPath)) .name) -}}
{{- end -}}
{{- $mount := . -}}
{{- range $other := $readOnly -}}
{{- if hasPrefix (printf "%s/" $other) $mount.mountPath -}}
{{- $texts = append $texts (printf "%s.extraVolumeMounts: %s lies in %s, which is mounted read-only, so that no folder can be made there; mount %s outside" $path $mount.mountPath $other $mount.name) -}}
{{- end -}}
{{- end -}}
{{- if and (eq (toString .mountPropagation) "Bidirectional") (not $privileged) -}}
{{- $texts = append $texts (printf "%s.extraVolumeMounts: mountPropagation: Bidirectional of %s is for privileged containers alone; set HostToContainer, or remove it" $path .name) -}}
{{- end -}}
{{- if has ".." (splitList "/" (default "" .subPath)) -}}
{{- $texts = append $texts (printf "%s.extraVolumeMounts: subPath: %q of %s leaves its volume; write a path without .." $path .subPath .name) -}}
{{- end -}}
{{- end -}}
{{- range $volume := $section.extraVolumes -}}
{{- if gt (len $volume) 2 -}}
{{- $texts = append $texts (printf "%s.extraVolumes: %s has several sources (%s), and a volume has one; remove the others" $path $volume.name (omit $volume "name" | keys | sortAlpha | join ", ")) -}}
{{- end -}}
{{- range $source := list "secret" "configMap" "projected" "downwardAPI" -}}
{{- $mode := (default dict (get $volume $source)).defaultMode -}}
{{- if has (toString $mode) (list "400" "440" "444" "500") -}}
{{- $texts = append $texts (printf "%s.extraVolumes: %s.defaultMode: %v of %s is a decimal number, %s in octal; write 0%v for what it looks like" $path $source $mode $volume.name (printf "%04o" (int64 $mode)) $mode) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $kind := list "sidecars" "initContainers" -}}
{{- range $index, $container := get $section $kind -}}
{{- $at := printf "%s.%s[%d]" $path $kind $index -}}
{{- $texts = concat $texts (include "spillway.ownContainerProblems" (dict "at" $at "kind" $kind "container" $container "kubeVersion" $root.Capabilities.KubeVersion.Version) | fromYamlArray) -}}
{{- range $container.volumeMounts -}}
{{- if not (has .name $volumes) -}}
{{- $texts = append $texts (printf "%s.volumeMounts: %s at %s is no volume of the pod; add it to %s.extraVolumes, or correct the name" $at .name .mountPath $path) -}}
{{- end -}}
{{- end -}}
{{- if or (eq $kind "sidecars") (eq (toString $container.restartPolicy) "Always") -}}
{{- range $port := $container.ports -}}
{{- range $name, $taken := $ports -}}
{{- if and (eq (int64 $port.containerPort) $taken) (ne (toString $port.protocol) "UDP") -}}
{{- $texts = append $texts (printf "%s.ports: %d is the pod's port %s already; let %s listen on another" $at (int64 $port.containerPort) $name $container.name) -}}
{{- else if eq (toString $port.name) $name -}}
{{- $texts = append $texts (printf "%s.ports: the name %s is that of port %d of the pod, which Services look for; choose another name" $at $name $taken) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $port := $container.ports -}}{{- $_ := set $ports (default (printf "of %s" $container.name) $port.name) (int64 $port.containerPort) -}}{{- end -}}
{{- else -}}
{{- range $probe := list "readinessProbe" "livenessProbe" "startupProbe" "lifecycle" -}}
{{- if get $container $probe -}}
{{- $texts = append $texts (printf "%s.%s given, but a container that ends before the others begin has none; remove it, or set restartPolicy: Always" $at $probe) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $resources := default dict $container.resources -}}
{{- range $name, $request := default dict $resources.requests -}}
{{- $limit := get (default dict $resources.limits) $name -}}
{{- if and $limit (or (hasPrefix "cpu" $name) (has $name (list "memory" "ephemeral-storage"))) -}}
{{- $most := ternary (include "spillway.milliCores" $limit) (include "spillway.readSize" $limit) (eq $name "cpu") | float64 -}}
{{- $asked := ternary (include "spillway.milliCores" $request) (include "spillway.readSize" $request) (eq $name "cpu") | float64 -}}
{{- if gt $asked $most -}}
{{- $texts = append $texts (printf "%s.resources: requests.%s %v is more than limits.%s %v; lower the first or raise the second" $at $name $request $name $limit) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $container.env -}}
{{- if and .valueFrom (ne (len .valueFrom) 1) -}}{{- $texts = append $texts (printf "%s.env: valueFrom of %s names %d sources, and it takes one; remove the others" $at .name (len .valueFrom)) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $section.extraEnvVars -}}
{{- if and (hasKey . "valueFrom") (ne (len .valueFrom) 1) -}}{{- $texts = append $texts (printf "%s.extraEnvVars: valueFrom of %s names %d sources, and it takes one; add or remove some" $path .name (len .valueFrom)) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- range $texts -}}{{- include "spillway.problem" (dict "problems" $.problems "text" .) -}}{{- end -}}
{{- end -}}

{{/* (at, kind, container, kubeVersion) -> list of texts: what contradicts itself within one container that values add. */}}
{{- define "spillway.ownContainerProblems" -}}
{{- $at := .at -}}{{- $container := .container -}}
{{- $texts := list -}}
{{- $policy := $container.restartPolicy -}}
{{- if and $policy (semverCompare "<1.35-0" .kubeVersion) -}}
{{- if eq .kind "sidecars" -}}
{{- $texts = append $texts (printf "%s.restartPolicy: %s given, but before Kubernetes 1.35 a container has none of its own; remove it, or make it one of initContainers with restartPolicy: Always, which starts first and stays" $at $policy) -}}
{{- else if ne $policy "Always" -}}
{{- $texts = append $texts (printf "%s.restartPolicy: %s given, Always needed before Kubernetes 1.35, for one that stays; set that, or remove it for one that ends" $at $policy) -}}
{{- end -}}
{{- end -}}
{{- $ports := dict -}}
{{- range $container.ports -}}
{{- if .name -}}
{{- if hasKey $ports .name -}}{{- $texts = append $texts (printf "%s.ports: the name %s is there twice; give each port its own" $at .name) -}}{{- end -}}
{{- $_ := set $ports .name true -}}
{{- end -}}
{{- end -}}
{{- range $probe := list "startupProbe" "readinessProbe" "livenessProbe" -}}
{{- with get $container $probe -}}
{{- if and (ne $probe "readinessProbe") (gt (int64 (default 1 .successThreshold)) 1) -}}
{{- $texts = append $texts (printf "%s.%s.successThreshold: %d given, 1 needed; remove it: only a readinessProbe has another" $at $probe (int64 .successThreshold)) -}}
{{- end -}}
{{- range $way := list "httpGet" "tcpSocket" -}}
{{- $port := (default dict (get (get $container $probe) $way)).port -}}
{{- if and (kindIs "string" $port) (not (hasKey $ports $port)) -}}
{{- $texts = append $texts (printf "%s.%s.%s.port: %s is no name among the container's ports; add it there, or write the number" $at $probe $way $port) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $folders := dict -}}
{{- range $container.volumeMounts -}}
{{- $folder := trimSuffix "/" .mountPath -}}
{{- if hasKey $folders $folder -}}{{- $texts = append $texts (printf "%s.volumeMounts: %s is given twice; mount each volume at a folder of its own" $at .mountPath) -}}{{- end -}}
{{- $_ := set $folders $folder true -}}
{{- if and (eq (toString .mountPropagation) "Bidirectional") (not (default dict $container.securityContext).privileged) -}}
{{- $texts = append $texts (printf "%s.volumeMounts: mountPropagation: Bidirectional of %s is for privileged containers alone; set HostToContainer, or remove it" $at .name) -}}
{{- end -}}
{{- end -}}
{{- $resources := default dict $container.resources -}}
{{- $limits := default dict $resources.limits -}}
{{- range $name, $request := default dict $resources.requests -}}
{{- if and (or (contains "/" $name) (hasPrefix "hugepages-" $name)) (ne (toString $request) (toString (get $limits $name))) -}}
{{- $texts = append $texts (printf "%s.resources: requests of %s: %v given, but limits have %v, and Kubernetes takes this resource with both alike; give both the same" $at $name $request (default "none" (get $limits $name))) -}}
{{- end -}}
{{- end -}}
{{- toYaml $texts -}}
{{- end -}}

{{/* -> folders of the chart's own in any of its pods, that podChecks keeps free. */}}
{{- define "spillway.ownFolders" -}}
[/etc/spillway, /dev/shm, /tmp, /var/lib/spillway/home, /var/lib/spillway/hub, /var/lib/spillway/secrets, /etc/valkey]
{{- end -}}

{{/* (path, mounts: of an engine, without extraVolumeMounts) -> list of texts: folders that values choose, and where no
volume can be. */}}
{{- define "spillway.mountProblems" -}}
{{- $path := .path -}}{{- $mounts := .mounts -}}
{{- $chosen := dict "model" "model.volume.mountPath" "adapters" "lora.volume.mountPath" "kv" "offload.sharedTier.nvme.path" "hugepages" "hugePages.mountPath" -}}
{{- $system := list "/bin" "/boot" "/dev" "/etc" "/home" "/lib" "/lib64" "/opt" "/proc" "/root" "/run" "/sbin" "/sys" "/usr" "/usr/local" "/var" "/var/lib" "/var/lib/spillway" -}}
{{- $texts := list -}}
{{- $seen := dict -}}
{{- range $mount := $mounts -}}
{{- if hasKey $chosen $mount.name -}}
{{- $at := printf "%s.%s" $path (get $chosen $mount.name) -}}
{{- $folder := trimSuffix "/" $mount.mountPath -}}
{{- if has $folder $system -}}
{{- $texts = append $texts (printf "%s: %s holds files of the image, which a volume there would hide; choose a folder of its own, such as /data" $at $folder) -}}
{{- end -}}
{{- range $other := $mounts -}}
{{- if ne $other.name $mount.name -}}
{{- $taken := trimSuffix "/" $other.mountPath -}}
{{- if and (eq $folder $taken) (not (hasKey $seen $other.name)) -}}
{{- $texts = append $texts (printf "%s: at %s the pod mounts its volume %s; choose another folder" $at $folder $other.name) -}}
{{- else if and $other.readOnly (hasPrefix (printf "%s/" $taken) $folder) -}}
{{- $texts = append $texts (printf "%s: %s lies in %s, which is mounted read-only, so that no folder can be made there; choose one outside" $at $folder $taken) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $_ := set $seen $mount.name true -}}
{{- end -}}
{{- end -}}
{{- toYaml $texts -}}
{{- end -}}

{{/* Contradictions in the settings of a shared tier, each with what to change. */}}

{{/* (root, item, problems) */}}
{{- define "spillway.tierChecks" -}}
{{- $root := .root -}}{{- $item := .item -}}{{- $problems := .problems -}}
{{- $engine := $item.engine -}}{{- $offload := $engine.offload -}}{{- $tier := $offload.sharedTier -}}
{{- $at := printf "%s.offload.sharedTier" $item.path -}}
{{- $texts := list -}}
{{- if contains "@" $tier.redis.url -}}
{{- $texts = append $texts (printf "%s.redis.url holds credentials; put them into a Secret and name it in redis.existingSecret" $at) -}}
{{- end -}}
{{- range $index, $extra := $offload.extraTiers -}}
{{- range $key, $value := $extra -}}
{{- if and (kindIs "string" $value) (regexMatch "(?i)(password|secret|credential|api_?key)" $key) (not (regexMatch "_(env|file)$" $key)) -}}
{{- $texts = append $texts (printf "%s.offload.extraTiers[%d].%s would lie in a ConfigMap in plain text; give that tier its secret by a variable (extraEnvVars) or a file (extraVolumes)" $item.path $index $key) -}}
{{- end -}}
{{- end -}}
{{- if has (toString $extra.type) (list "spillway-nvme" "spillway-redis") -}}
{{- $texts = append $texts (printf "%s.offload.extraTiers[%d].type: %s given, which is Spillway's own; set offload.sharedTier.type: %s in its place" $item.path $index $extra.type (trimPrefix "spillway-" $extra.type)) -}}
{{- end -}}
{{- if not $extra.type -}}
{{- $texts = append $texts (printf "%s.offload.extraTiers[%d].type: nothing given, vLLM's name of a tier needed; add it, e.g. type: fs" $item.path $index) -}}
{{- end -}}
{{- end -}}
{{- $isKey := regexMatch "^([0-9a-fA-F]{32}|[0-9a-fA-F]{48}|[0-9a-fA-F]{64})$" $tier.encryption.keyId -}}
{{- if $isKey -}}
{{- $texts = append $texts (printf "%s.encryption.keyId: %d hexadecimal digits given, which look like the key itself and would lie in a ConfigMap; make another key, keep it in the Secret alone, and give it a public name such as \"2026-11\"" $at (len $tier.encryption.keyId)) -}}
{{- else if regexMatch "[^A-Za-z0-9._-]" $tier.encryption.keyId -}}
{{- $texts = append $texts (printf
  "%s.encryption.keyId: text of %d characters given, the public name of the key (at most 64 letters, digits, dots, dashes and underscores, never the key itself) needed; correct it"
  $at (len $tier.encryption.keyId)) -}}
{{- end -}}

{{- if and (ne $tier.type "none") (not $offload.enabled) -}}
{{- $texts = append $texts (printf "%s.type: %s, but offload.enabled is false; a shared tier is filled from the CPU tier: enable offload or set type: none" $at $tier.type) -}}
{{- else if ne $tier.type "none" -}}
{{- $settings := $item.settings.offload.sharedTier -}}
{{- /* A bound below one chunk lets nothing through. */ -}}
{{- $row := int64 $item.memory.cpuRowBytes -}}
{{- $own := get $settings $tier.type -}}
{{- range $bound := list (list "loadQueueBytesMax" $settings.loadQueueBytesMax) (list "storeQueueBytesMax" $settings.storeQueueBytesMax) (list (printf "%s.maxBytes" $tier.type) $own.maxBytes) (list (printf "%s.tenantMaxBytes" $tier.type) $own.tenantMaxBytes) -}}
{{- $bytes := index $bound 1 -}}
{{- if and (not (kindIs "invalid" $bytes)) (lt (int64 $bytes) $row) (eq (index $bound 0) "nvme.maxBytes") (not
  $tier.nvme.maxBytes) -}}
{{- $texts = append $texts (printf
  "%s.nvme.volume.size: %v given, nine tenths of which hold no chunk of %s; set it to %d or more (with a unit, such as 500GiB), or lower offload.blocksPerChunk"
  $at $tier.nvme.volume.size (include "spillway.bytesText" $row) (div (add (mul $row 10) 8) 9)) -}}
{{- else if and (not (kindIs "invalid" $bytes)) (lt (int64 $bytes) $row) -}}
{{- $texts = append $texts (printf "%s.%s: %s holds no chunk of %s; set it to %d or more, or lower offload.blocksPerChunk" $at (index $bound 0) (include "spillway.bytesText" $bytes) (include "spillway.bytesText" $row) $row) -}}
{{- end -}}
{{- end -}}
{{- with $tier.encryption -}}
{{- if .enabled -}}
{{- if not .keyId -}}{{- $texts = append $texts (printf "%s.encryption.keyId is empty; give the key a public name, e.g. the date it was made: another key under another name begins with an empty tier" $at) -}}{{- end -}}
{{- if not .keySecretName -}}{{- $texts = append $texts (printf "%s.encryption.keySecretName is empty; encryption.enabled: true needs a Secret with the key: kubectl create secret generic kv-key --from-literal=%s=$(openssl rand -hex 32)" $at .keySecretKey) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- if eq $tier.type "nvme" -}}{{- $texts = concat $texts (include "spillway.nvmeProblems" (dict "item" $item "at" $at "problems" $problems) | fromYamlArray) -}}{{- end -}}
{{- if eq $tier.type "redis" -}}{{- $texts = concat $texts (include "spillway.redisProblems" (dict "root" $root "item" $item "at" $at) | fromYamlArray) -}}{{- end -}}
{{- /* Files from Secrets are root's and, with fsGroup, the group's. */ -}}
{{- $pod := $item.accelerator.podSecurityContext -}}
{{- $user := default (default 0 $pod.runAsUser) $item.accelerator.securityContext.runAsUser -}}
{{- if and $item.secretFiles (ne (int64 $user) 0) (not (hasKey $pod "fsGroup")) -}}
{{- $texts = append $texts (printf "%s: user %d of the engine cannot read the files of Secret %s, which are root's alone; add fsGroup to %s.podSecurityContext" $at (int64 $user) (first $item.secretFiles).name $item.path) -}}
{{- end -}}
{{- else if $tier.encryption.enabled -}}
{{- $texts = append $texts (printf "%s.encryption.enabled: true, but sharedTier.type is none; it seals a shared tier: set type: nvme or redis, or encryption.enabled: false" $at) -}}
{{- end -}}
{{- /* A key that is named but not used would store blocks in the clear where the operator expects them sealed. */ -}}
{{- with $tier.encryption -}}
{{- if and (not .enabled) (or .keyId .keySecretName) -}}
{{- $given := ternary (printf "keyId: %s" (or $isKey (regexMatch "[^A-Za-z0-9._-]" .keyId) | ternary "***" .keyId)) (printf "keySecretName: %s" .keySecretName) (ne (default "" .keyId) "") -}}
{{- $texts = append $texts (printf "%s.encryption: %s is given, but enabled is false, so blocks would be stored unsealed; set encryption.enabled: true, or remove keyId and keySecretName" $at $given) -}}
{{- end -}}
{{- end -}}
{{- range $texts -}}{{- include "spillway.problem" (dict "problems" $problems "text" .) -}}{{- end -}}
{{- end -}}

{{/* (item, at, problems) -> list of texts. */}}
{{- define "spillway.nvmeProblems" -}}
{{- $at := printf "%s.nvme" .at -}}{{- $nvme := .item.engine.offload.sharedTier.nvme -}}{{- $volume := $nvme.volume -}}
{{- $settings := .item.settings.offload.sharedTier.nvme -}}
{{- $texts := list -}}
{{- if and (eq $volume.type "hostPath") (not $volume.hostPath) -}}
{{- $texts = append $texts (printf "%s.volume.hostPath is empty; type: hostPath needs a folder of the node, such as /var/lib/spillway/kv" $at) -}}
{{- end -}}
{{- if and (eq $volume.type "existingClaim") (not $volume.claimName) -}}
{{- $texts = append $texts (printf "%s.volume.claimName is empty; type: existingClaim needs it" $at) -}}
{{- end -}}
{{- if and $nvme.maxBytes (has $volume.type (list "emptyDir" "perPodClaim" "sharedClaim")) -}}
{{- $size := int64 (include "spillway.bytes" (dict "value" $volume.size "path" (printf "%s.volume.size" $at))) -}}
{{- if gt (int64 $settings.maxBytes) $size -}}
{{- $texts = append $texts (printf "%s.maxBytes: %s does not fit into the volume of %s; set maxBytes <= %s, null for nine tenths of it, or enlarge volume.size" $at (include "spillway.bytesText" $settings.maxBytes) (include "spillway.bytesText" $size) $volume.size) -}}
{{- end -}}
{{- end -}}
{{- if and $settings.maxBytes $settings.tenantMaxBytes -}}
{{- if gt (int64 $settings.tenantMaxBytes) (int64 $settings.maxBytes) -}}
{{- $texts = append $texts (printf "%s.tenantMaxBytes: %s for one tenant is more than maxBytes: %s for all; set it to %d or less" $at (include "spillway.bytesText" $settings.tenantMaxBytes) (include "spillway.bytesText" $settings.maxBytes) (int64 $settings.maxBytes)) -}}
{{- end -}}
{{- end -}}
{{- /* The index of slabs is a file that all engines map into memory and lock: one kernel has to see them all. */ -}}
{{- if eq $nvme.mode "slab" -}}
{{- if eq $volume.type "sharedClaim" -}}
{{- $texts = append $texts (printf "%s.mode: slab needs a disk of one node, but volume.type: sharedClaim is a ReadWriteMany claim that several nodes mount; set mode: files, or volume.type: hostPath or perPodClaim" $at) -}}
{{- else if and (eq $volume.type "existingClaim") (gt (int64 .item.pods) 1) -}}
{{- $texts = append $texts (printf "%s.mode: slab needs a disk of one node, but up to %d pods on any nodes mount claim %s; set mode: files (or auto, which looks at the file system), or volume.type: hostPath or perPodClaim" $at (int64 .item.pods) $volume.claimName) -}}
{{- end -}}
{{- end -}}
{{- toYaml $texts -}}
{{- end -}}

{{/* (root, item, at) -> list of texts. */}}
{{- define "spillway.redisProblems" -}}
{{- $at := printf "%s.redis" .at -}}{{- $redis := .item.engine.offload.sharedTier.redis -}}{{- $root := .root -}}
{{- $settings := .item.settings.offload.sharedTier.redis -}}
{{- $texts := list -}}
{{- $host := "(\\[[0-9A-Fa-f:.]+\\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?" -}}
{{- $hosts := printf "%s(,%s)*" $host $host -}}
{{- $forms := list (printf "rediss?://%s(/[0-9]*)?" $host) (printf "rediss?-sentinel://%s/[^/?#,]+(\\?db=[0-9]+)?" $hosts) (printf "rediss?-cluster://%s(/0?)?" $hosts) "unix:///[^?#]+(\\?db=[0-9]+)?" -}}
{{- if not (or $redis.url $root.Values.redis.enabled) -}}
{{- $texts = append $texts (printf "%s.url is empty; give one (redis://host:6379/0), or redis.enabled: true for the embedded trial server" $at) -}}
{{- else if and $redis.url (not (contains "@" $redis.url)) (not (regexMatch (printf "^(%s)$" (join "|" $forms)) $redis.url)) -}}
{{- $texts = append $texts (printf "%s.url: %q is no address; write redis://host:6379/0, redis-sentinel://host:26379,host:26379/service?db=0, redis-cluster://host:6379,host:6379 (rediss for TLS) or unix:///path?db=0" $at (include "spillway.shownUrl" $redis.url)) -}}
{{- end -}}
{{- if and (hasPrefix "unix:" $redis.url) (not .item.engine.extraVolumeMounts) -}}
{{- $texts = append $texts (printf "%s.url: %s is a socket in the pod, but nothing brings it; mount its folder with extraVolumes and extraVolumeMounts" $at (include "spillway.shownUrl" $redis.url)) -}}
{{- end -}}
{{- range regexFindAll ":[0-9]{1,5}([,/]|$)" (regexReplaceAll "\\[[^]]*\\]" (default "" $redis.url) "") -1 -}}
{{- $port := regexFind "[0-9]+" . -}}
{{- if not (and (ge (atoi $port) 1) (le (atoi $port) 65535)) -}}
{{- $texts = append $texts (printf "%s.url: port %s given, 1 to 65535 needed; correct it (Redis has 6379, Sentinel 26379)" $at $port) -}}
{{- end -}}
{{- end -}}
{{- if and $settings.tls (not (hasPrefix "rediss" $settings.url)) -}}
{{- $texts = append $texts (printf "%s.tls names Secrets, but url: %s asks for no TLS; write rediss://..., or remove them" $at (include "spillway.shownUrl" $settings.url)) -}}
{{- end -}}
{{- if and $redis.existingSecret.usernameKey (not $redis.existingSecret.name) -}}
{{- $texts = append $texts (printf "%s.existingSecret.usernameKey: %s, but existingSecret.name is empty; name the Secret, or remove usernameKey" $at $redis.existingSecret.usernameKey) -}}
{{- end -}}
{{- if gt (int64 $redis.payloadConnections) (int64 $redis.connections) -}}
{{- $texts = append $texts (printf "%s.payloadConnections: %d is more than connections: %d; raise connections or lower payloadConnections" $at (int64 $redis.payloadConnections) (int64 $redis.connections)) -}}
{{- end -}}
{{- if and (not $redis.url) $root.Values.redis.enabled -}}
{{- if and $redis.existingSecret.name (ne $redis.existingSecret.name $root.Values.redis.existingSecret.name) -}}
{{- $texts = append $texts (printf "%s.existingSecret.name: %s, but the embedded server's password comes from redis.existingSecret.name (%s), which its engines get; remove it here, and name the Secret there" $at $redis.existingSecret.name (default "none" $root.Values.redis.existingSecret.name)) -}}
{{- end -}}
{{- $most := int64 (include "spillway.redisBlockBytes" $root) -}}
{{- $row := int64 .item.memory.cpuRowBytes -}}
{{- if lt $most $row -}}
{{- $texts = append $texts (printf "redis.memory: three quarters of %v, %s, hold no chunk of %s; set it to %s or more" $root.Values.redis.memory (include "spillway.bytesText" $most) (include "spillway.bytesText" $row) (include "spillway.quantity" (div (mul $row 4) 3 | add1))) -}}
{{- end -}}
{{- if gt (int64 (default 0 $settings.tenantMaxBytes)) $most -}}
{{- $texts = append $texts (printf "%s.tenantMaxBytes: %s for one tenant is more than the embedded server holds for all: three quarters of redis.memory, %s; set it to %d or less" $at (include "spillway.bytesText" $settings.tenantMaxBytes) (include "spillway.bytesText" $most) $most) -}}
{{- end -}}
{{- end -}}
{{- with $root.Values.networkPolicy -}}
{{- if and .enabled .restrictEgress $redis.url (not (hasPrefix "unix:" $redis.url)) (not .engineEgress) -}}
{{- $texts = append $texts (printf "networkPolicy.restrictEgress: true closes the way to %s.url: %s; list its address in networkPolicy.engineEgress" $at (include "spillway.shownUrl" $redis.url)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $texts -}}
{{- end -}}

{{/* Values against what is known of the model and the platform. */}}

{{/* (item, problems) */}}
{{- define "spillway.factChecks" -}}
{{- $item := .item -}}{{- $engine := $item.engine -}}{{- $path := $item.path -}}{{- $shape := $item.shape -}}{{- $memory := $item.memory -}}
{{- $offload := $engine.offload -}}{{- $ranks := int64 $engine.tensorParallelSize -}}{{- $preset := $engine.accelerator.preset -}}
{{- $texts := list -}}
{{- $step := int64 $item.accelerator.blockTokensMultiple -}}
{{- if mod (int64 $engine.blockSize) $step -}}
{{- $texts = append $texts (printf "%s.blockSize: %d given, a multiple of %d needed by accelerator.preset: %s; set it to %d" $path (int64 $engine.blockSize) $step $preset (mul (div (add (int64 $engine.blockSize) (sub $step 1)) $step) $step)) -}}
{{- end -}}
{{- if and $shape.kvHeads (not $shape.latentDim) -}}
{{- $heads := int64 $shape.kvHeads -}}
{{- if and (gt $ranks $heads) (mod $ranks $heads) -}}
{{- $texts = append $texts (printf "%s.tensorParallelSize: %d is no multiple of the model's %d KV heads, of which every rank needs a whole one; set it to %d" $path $ranks $heads (mul (div $ranks $heads) $heads)) -}}
{{- end -}}
{{- end -}}
{{- with $shape.heads -}}
{{- if mod (int64 .) $ranks -}}
{{- $texts = append $texts (printf "%s.tensorParallelSize: %d does not divide the model's %d attention heads, as vLLM needs it; choose a divisor of %d" $path $ranks (int64 .) (int64 .)) -}}
{{- end -}}
{{- end -}}
{{- $texts = concat $texts (include "spillway.pipelineProblems" $item | fromYamlArray) -}}
{{- $texts = concat $texts (include "spillway.dataParallelProblems" $item | fromYamlArray) -}}
{{- $maxLength := int64 $engine.model.maxLength -}}
{{- $stretched := hasKey $engine.extraEnv "VLLM_ALLOW_LONG_MAX_MODEL_LEN" -}}
{{- range $engine.extraArgs -}}{{- if regexMatch "^--(hf|rope)[-_]" . -}}{{- $stretched = true -}}{{- end -}}{{- end -}}
{{- with $shape.maxLength -}}
{{- if and (gt $maxLength (int64 .)) (not $stretched) -}}
{{- $texts = append $texts (printf "%s.model.maxLength: %d given, but %s has %d positions; set it to %d or less, or give vLLM a longer model by --hf-overrides in extraArgs" $path $maxLength (base $engine.model.path) (int64 .) (int64 .)) -}}
{{- end -}}
{{- end -}}
{{- if and $offload.enabled (gt (int64 $memory.chunkTokens) $maxLength) -}}
{{- $texts = append $texts (printf "%s.offload.blocksPerChunk: %d blocks of %d tokens are a chunk of %d, which no prompt of model.maxLength: %d fills, so nothing would ever be spilled; %s" $path (int64 $offload.blocksPerChunk) (int64 $engine.blockSize) (int64 $memory.chunkTokens) $maxLength (ternary (printf "set it to %d or less" (div $maxLength (int64 $engine.blockSize))) (printf "raise model.maxLength to %d or more, or lower blockSize" (int64 $engine.blockSize)) (ge $maxLength (int64 $engine.blockSize)))) -}}
{{- end -}}
{{- if and $offload.enabled (eq $item.platform "cpu") (eq (include "spillway.onOff" $offload.batchMemcpy) "on") (has $offload.transport (list "auto" "cpu")) -}}
{{- $texts = append $texts (printf "%s.offload.batchMemcpy: on needs a device driver with batched copies, and accelerator.preset: cpu has none; set auto or off" $path) -}}
{{- end -}}
{{- $isHub := not (hasPrefix "/" $engine.model.path) -}}
{{- $weights := 0 -}}
{{- if $shape.weightBytes -}}{{- $weights = int64 (include "spillway.bytes" (dict "value" $shape.weightBytes "path" (printf "%s.model.shape.weightBytes" $path))) -}}{{- end -}}
{{- if and $isHub (eq $engine.model.cache.type "emptyDir") $engine.model.cache.sizeLimit -}}
{{- $room := int64 (include "spillway.bytes" (dict "value" $engine.model.cache.sizeLimit "path" (printf "%s.model.cache.sizeLimit" $path))) -}}
{{- if lt $room $weights -}}
{{- $texts = append $texts (printf "%s.model.cache.sizeLimit: %v holds no download of %s, %s; kubelet would evict the pod: set %s or more, or null" $path $engine.model.cache.sizeLimit $engine.model.path (include "spillway.bytesText" $weights) (include "spillway.quantity" (div (mul $weights 11) 10))) -}}
{{- end -}}
{{- end -}}
{{- if and $isHub (eq $engine.model.cache.type "emptyDir") $engine.ephemeralStorage.limit -}}
{{- $room := int64 (include "spillway.bytes" (dict "value" $engine.ephemeralStorage.limit "path" (printf "%s.ephemeralStorage.limit" $path))) -}}
{{- if lt $room $weights -}}
{{- $texts = append $texts (printf "%s.ephemeralStorage.limit: %v holds no download of %s, %s, into model.cache.type: emptyDir, which counts against it; kubelet would evict the pod: set %s or more, or null" $path $engine.ephemeralStorage.limit $engine.model.path (include "spillway.bytesText" $weights) (include "spillway.quantity" (div (mul $weights 11) 10))) -}}
{{- end -}}
{{- end -}}
{{- if and (not (include "spillway.usesHub" $engine)) (or (ne $engine.model.cache.type "emptyDir") $engine.model.cache.sizeLimit) -}}
{{- $texts = append $texts (printf "%s.model.cache: type %s given, but model.path: %s is a folder, and only downloads are kept there; remove model.cache" $path $engine.model.cache.type $engine.model.path) -}}
{{- end -}}
{{- if $item.accelerator.resourceName -}}
{{- range $vendor, $preset := dict "nvidia.com/" "cuda" "huawei.com/" "mindcluster, cce or hami" "amd.com/" "" "gpu.intel.com/" "" "google.com/tpu" "" "aws.amazon.com/neuron" "" -}}
{{- if and (hasPrefix $vendor $item.accelerator.resourceName) (ne $item.platform (get (dict "nvidia.com/" "cuda" "huawei.com/" "npu") $vendor)) -}}
{{- $texts = append $texts (printf "%s.accelerator.resourceName: %s is no device for the engine image of preset: %s; %s" $path $item.accelerator.resourceName $engine.accelerator.preset (ternary (printf "set preset: %s" $preset) "engines run on Ascend NPUs, NVIDIA GPUs and CPUs: choose a node of one of these" (ne $preset ""))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $texts = concat $texts (include "spillway.deviceMemoryProblems" (dict "item" $item "weights" $weights) |
  fromYamlArray) -}}
{{- $texts = concat $texts (include "spillway.startProblems" (dict "item" $item "weights" $weights) | fromYamlArray) -}}
{{- range $texts -}}{{- include "spillway.problem" (dict "problems" $.problems "text" .) -}}{{- end -}}
{{- end -}}

{{/* item -> list of texts: what does not go with several stages of layers. */}}
{{- define "spillway.pipelineProblems" -}}
{{- $engine := .engine -}}{{- $path := .path -}}{{- $stages := int64 $engine.pipelineParallelSize -}}
{{- $texts := list -}}
{{- if gt $stages 1 -}}
{{- if gt $stages (int64 .shape.layers) -}}
{{- $texts = append $texts (printf "%s.pipelineParallelSize: %d stages for the model's %d layers, of which every stage needs one; set it to %d or less" $path $stages (int64 .shape.layers) (int64 .shape.layers)) -}}
{{- end -}}
{{- if and (eq .platform "cpu") (ne (toString $engine.image.vllm) "0.23") -}}
{{- $texts = append $texts (printf "%s.pipelineParallelSize: %d needs vLLM 0.23 with accelerator.preset: cpu, but %s.image.vllm is %q, whose CPU engines fail at the first step of a pipeline; set it to 1, or vllm: \"0.23\"" $path $stages $path (toString $engine.image.vllm)) -}}
{{- end -}}
{{- range list "layerwiseLoads" "computeWhileLoading" -}}
{{- if and $engine.offload.enabled (eq (include "spillway.onOff" (index $engine.offload .)) "on") -}}
{{- $texts = append $texts (printf "%s.offload.%s: on changes a step after it was sent, but pipelineParallelSize: %d keeps several steps under way; set it to off, or pipelineParallelSize: 1" $path . $stages) -}}
{{- end -}}
{{- end -}}
{{- $variable := "VLLM_PP_LAYER_PARTITION" -}}
{{- if hasKey (default dict $engine.extraEnv) $variable -}}
{{- $texts = append $texts (printf "%s.extraEnv: %s gives stages other layers than memory is reckoned with; remove it: vLLM spreads the layers evenly over the stages of pipelineParallelSize: %d" $path $variable $stages) -}}
{{- end -}}
{{- range $at, $argument := $engine.extraArgs -}}
{{- if regexMatch "^--distributed[-_]executor[-_]backend" $argument -}}
{{- $executor := contains "=" $argument | ternary (last (splitList "=" $argument)) (index (append $engine.extraArgs "") (add1 $at | int)) -}}
{{- if ne $executor "mp" -}}
{{- $texts = append $texts (printf "%s.extraArgs: --distributed-executor-backend: %q cannot run pipelineParallelSize: %d in one pod; remove it, and vLLM takes mp" $path $executor $stages) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $texts -}}
{{- end -}}

{{/* item -> list of texts: what does not go with several data parallel ranks. */}}
{{- define "spillway.dataParallelProblems" -}}
{{- $engine := .engine -}}{{- $path := .path -}}{{- $cores := int64 $engine.dataParallelSize -}}{{- $stages := int64 $engine.pipelineParallelSize -}}
{{- $texts := list -}}
{{- if gt $cores 1 -}}
{{- if gt $stages 1 -}}
{{- $texts = append $texts (printf "%s.pipelineParallelSize: %d and dataParallelSize: %d: stages are not proven with data parallel ranks; set pipelineParallelSize: 1 or dataParallelSize: 1" $path $stages $cores) -}}
{{- end -}}
{{- range list "layerwiseLoads" "computeWhileLoading" -}}
{{- if and $engine.offload.enabled (eq (include "spillway.onOff" (index $engine.offload .)) "on") -}}
{{- $texts = append $texts (printf "%s.offload.%s: on changes the steps of one rank, but the ranks of dataParallelSize: %d step together where the model is a mixture of experts; set it to off, or dataParallelSize: 1" $path . $cores) -}}
{{- end -}}
{{- end -}}
{{- if and (eq .platform "cpu") .shape.experts -}}
{{- $texts = append $texts (printf "%s.dataParallelSize: %d ranks of a mixture of %d experts need exchanges of tokens that vLLM's CPU platform does not have; set it to 1 and raise replicas" $path $cores (int64 .shape.experts)) -}}
{{- end -}}
{{- with (default dict $engine.kvTransfer).connector -}}
{{- $texts = append $texts (printf "%s.kvTransfer: %s is not proven with dataParallelSize: %d; remove it, or set dataParallelSize: 1" $path . $cores) -}}
{{- end -}}
{{- end -}}
{{- toYaml $texts -}}
{{- end -}}

{{/* item -> list of texts: vLLM publishes the events of data parallel rank r at both ports + r. */}}
{{- define "spillway.rankPortProblems" -}}
{{- $engine := .engine -}}{{- $path := .path -}}{{- $cores := int64 $engine.dataParallelSize -}}{{- $http := int64 $engine.port -}}
{{- $texts := list -}}
{{- if and $engine.kvEvents.enabled (gt $cores 1) -}}
{{- $events := int64 $engine.kvEvents.port -}}{{- $replays := int64 $engine.kvEvents.replayPort -}}
{{- range $key, $first := dict "port" $events "replayPort" $replays -}}
{{- $last := sub (add $first $cores) 1 -}}
{{- if gt $last 65535 -}}
{{- $texts = append $texts (printf "%s.kvEvents.%s: %d with dataParallelSize: %d, whose last rank would use %d; set it to %d or less" $path $key $first $cores $last (sub 65536 $cores)) -}}
{{- end -}}
{{- if and (gt $http $first) (le $http $last) -}}
{{- $texts = append $texts (printf "%s.port: %d is among %d to %d, kvEvents.%s of the ranks of dataParallelSize: %d; choose one outside" $path $http $first $last $key $cores) -}}
{{- end -}}
{{- end -}}
{{- $apart := sub (max $events $replays) (min $events $replays) -}}
{{- if and (gt $apart 0) (lt $apart $cores) -}}
{{- $texts = append $texts (printf "%s.kvEvents: port: %d and replayPort: %d are %d apart, and rank r of dataParallelSize: %d uses both + r; set them %d or more apart" $path $events $replays $apart $cores $cores) -}}
{{- end -}}
{{- end -}}
{{- toYaml $texts -}}
{{- end -}}

{{/* (item, weights) -> list of texts: weights that no device holds, found after an hour's download else. memoryMiB and
the name of a part of a device (MIG) say how large one is; else it is the largest that the preset stands for. Quantised
weights and those kept in host memory may be smaller than is known here. */}}
{{- define "spillway.deviceMemoryProblems" -}}
{{- $engine := .item.engine -}}
{{- $texts := list -}}
{{- $preset := $engine.accelerator.preset -}}{{- $resource := toString .item.accelerator.resourceName -}}
{{- $gibibytes := get (dict "mindcluster" 64 "cce" 64 "hami" 64 "a5" 144 "custom" 144) $preset | default 288 -}}
{{- $of := printf "that a device of accelerator.preset: %s has at most" $preset -}}
{{- if hasSuffix "/Ascend910B4" $resource -}}{{- $gibibytes = 32 -}}{{- $of = printf "of a %s" $resource -}}{{- end -}}
{{- with regexFind "mig-[0-9]+g\\.[0-9]+gb" $resource -}}
{{- $gibibytes = regexReplaceAll "mig-[0-9]+g\\.([0-9]+)gb" . "${1}" -}}{{- $of = printf "of a %s" $resource -}}
{{- end -}}
{{- $most := mul 1073741824 (int64 $gibibytes) -}}
{{- with $engine.accelerator.memoryMiB -}}
{{- $most = mul (int64 .) 1048576 -}}{{- $of = "of accelerator.memoryMiB" -}}
{{- end -}}
{{- /* Every data parallel rank has all weights, but for experts that are spread over them. */ -}}
{{- $ranks := mul (int64 $engine.tensorParallelSize) (int64 $engine.pipelineParallelSize) -}}
{{- if and .item.shape.experts (has "--enable-expert-parallel" $engine.extraArgs) -}}{{- $ranks = include "spillway.ranks" $engine | int64 -}}{{- end -}}
{{- $elsewhere := int64 (include "spillway.argumentMemory" (dict "arguments" (default list $engine.extraArgs) "onCpu" false
  "ranks" 1 "cores" 1 "weightBytes" 1) | fromJson).processBytes -}}
{{- $share := div (int64 .weights) $ranks -}}
{{- if and (ne .item.platform "cpu") (not $engine.model.quantization) (eq $elsewhere 0) (gt $share $most) -}}
{{- $texts = append $texts (printf "%s.tensorParallelSize: %d given (%d ranks), but the weights of %s are %s, %s for each, more than the %s %s; set it so that there are %d ranks or more, or choose a smaller model%s"
  .item.path (int64 $engine.tensorParallelSize) $ranks (default $engine.model.path $engine.model.shape.preset) (include "spillway.bytesText" .weights) (include "spillway.bytesText" $share)
  (include "spillway.bytesText" $most) $of (add1 (div (int64 .weights) $most))
  (ternary ", or raise accelerator.memoryMiB" "" (not (empty $engine.accelerator.memoryMiB)))) -}}
{{- end -}}
{{- toYaml $texts -}}
{{- end -}}

{{/* (item, weights) -> list of texts: a start that cannot end in time is killed and restarted without end. The rates are
above those of any disk, network or kernel that an engine starts on, so that no start that could succeed is refused. */}}
{{- define "spillway.startProblems" -}}
{{- $engine := .item.engine -}}{{- $lifecycle := $engine.lifecycle -}}
{{- $texts := list -}}
{{- $seconds := 30.0 -}}{{- $parts := list "30 s for Python and vLLM" -}}
{{- if not (has (toString $lifecycle.selfCheck) (list "off" "false")) -}}
{{- $seconds = addf $seconds $lifecycle.selfCheckTimeoutSeconds -}}
{{- $parts = append $parts (printf "up to %v s for the start-up check (selfCheckTimeoutSeconds)" $lifecycle.selfCheckTimeoutSeconds) -}}
{{- end -}}
{{- $tierBytes := float64 (default 0 .item.memory.cpuTierBytes) -}}
{{- /* 16 TiB: no host has as much, so that it is the size that is wrong, not the time to fill it. */ -}}
{{- if gt $tierBytes 17592186044416.0 -}}
{{- $key := ternary "numCpuBlocks" "cpuBytes" (not (empty $engine.offload.numCpuBlocks)) -}}
{{- $texts = append $texts (printf
  "%s.offload.%s: %v given, a CPU tier of %s for each pod, which no host's memory holds; lower it (a chunk has %s)"
  .item.path $key (get $engine.offload $key) (include "spillway.bytesText" (int64 $tierBytes)) (include "spillway.bytesText" .item.memory.cpuRowBytes)) -}}
{{- $tierBytes = 0.0 -}}
{{- end -}}
{{- $bytes := addf (float64 .weights) $tierBytes -}}
{{- $moving := ceil (divf $bytes 20000000000.0) -}}
{{- if ge $moving 1.0 -}}
{{- $seconds = addf $seconds $moving -}}
{{- $parts = append $parts (printf "%v s for weights and CPU tier (%s at 20 GB/s)" $moving (include "spillway.bytesText" (int64 $bytes))) -}}
{{- end -}}
{{- if lt (float64 $lifecycle.startupTimeoutSeconds) $seconds -}}
{{- $texts = append $texts (printf "%s.lifecycle.startupTimeoutSeconds: %v given, at least %v needed: %s; a pod that is not ready by then is killed and restarted, again and again: raise it" .item.path $lifecycle.startupTimeoutSeconds $seconds (join ", " $parts)) -}}
{{- end -}}
{{- toYaml $texts -}}
{{- end -}}

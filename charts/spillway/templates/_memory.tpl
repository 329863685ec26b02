{{/*
The arithmetic of services/engine/src/spillway_engine/memory_budget.py, reported before anything is scheduled.
tests/chart/test_template_arithmetic.py renders generated cases and compares. On top of it the pod's own share:
processes, staging, page cache and margin.
*/}}

{{/* (engine, path, root, problems, out): the model's shape, from values or files/model-shapes.yaml, into out. */}}
{{- define "spillway.shape" -}}
{{- $model := .engine.model -}}
{{- $given := $model.shape -}}
{{- $known := .root.Files.Get "files/model-shapes.yaml" | fromYaml -}}
{{- $file := base $model.path | lower -}}
{{- $name := regexReplaceAll "(-(instruct|thinking|chat|base|it|hf|bf16|v0\\.[0-9]+|[0-9]{4}|awq|gptq|gptqmodel|autoround|quantized|bnb|marlin|fp8|fp4|nvfp4|mxfp4|mxfp8|int4|int8|[48]bit|(quantized\\.)?w[48]a(4|8|16)|dynamic|block|kv|128g|g128))+$" (trimPrefix "meta-" $file) "" -}}
{{- if hasKey $known $file -}}{{- $name = $file -}}{{- end -}}
{{- /* Quantised weights, in eighths of those in 16 bits: embeddings stay as they are, so somewhat more than half or a quarter. */ -}}
{{- $eighths := 8 -}}
{{- if and (hasPrefix $name (trimPrefix "meta-" $file)) (not $given.preset) -}}
{{- $ending := trimPrefix $name (trimPrefix "meta-" $file) -}}
{{- if regexMatch "-(fp8|mxfp8|int8|8bit|(quantized\\.)?w8a)" $ending -}}{{- $eighths = 5 -}}
{{- else if regexMatch "-(awq|gptq|gptqmodel|autoround|bnb|fp4|nvfp4|mxfp4|int4|4bit|(quantized\\.)?w4a)" $ending -}}{{- $eighths = 3 -}}{{- end -}}
{{- end -}}
{{- $name = default $name $given.preset -}}
{{- if and $given.preset (not (hasKey $known $name)) -}}
{{- include "spillway.problem" (dict "problems" .problems "text" (printf "%s.model.shape.preset: %q is no known model; give layers, kvHeads and headDim from its config.json, or one of: %s" .path $name (keys $known | sortAlpha | join ", "))) -}}
{{- end -}}
{{- include "spillway.overlay" (dict "base" .out "over" (dict "dtype" "bfloat16" "weightBytes" 0)) -}}
{{- include "spillway.overlay" (dict "base" .out "over" (get $known $name | default dict)) -}}
{{- if lt $eighths 8 -}}{{- $_ := set .out "quantized" true -}}{{- $_ = set .out "weightBytes" (div (mul (int64 .out.weightBytes) $eighths) 8) -}}{{- end -}}
{{- range $key := list "layers" "slidingLayers" "kvHeads" "headDim" "latentDim" "dtype" "weightBytes" -}}
{{- $value := get $given $key -}}
{{- if not (or (kindIs "invalid" $value) (eq (toString $value) "")) -}}
{{- $_ := set $.out $key $value -}}
{{- if or (eq $key "kvHeads") (eq $key "headDim") -}}{{- $_ = unset $.out "latentDim" -}}{{- end -}}
{{- if eq $key "layers" -}}{{- $_ = unset $.out "slidingLayers" -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .out.layers (gt (int64 (default 0 .out.slidingLayers)) (int64 .out.layers)) -}}
{{- include "spillway.problem" (dict "problems" .problems "text" (printf "%s.model.shape.slidingLayers: %d of %d layers; set it to the number of sliding_attention in layer_types of config.json, %d or less" .path (int64 .out.slidingLayers) (int64 .out.layers) (int64 .out.layers))) -}}
{{- $_ := unset .out "slidingLayers" -}}
{{- end -}}
{{- if and $given.latentDim (or $given.kvHeads $given.headDim) -}}
{{- include "spillway.problem" (dict "problems" .problems "text" (printf "%s.model.shape: latentDim: %d given beside kvHeads or headDim, but a model has one kind of cache; keep latentDim for MLA, or the other two" .path (int64 $given.latentDim))) -}}
{{- end -}}
{{- if not (and .out.layers (or .out.latentDim (and .out.kvHeads .out.headDim))) -}}
{{- $alike := list -}}
{{- range $one := keys $known | sortAlpha -}}
{{- if eq (regexFind "^[a-z]+" $one) (regexFind "^[a-z]+" $file) -}}{{- $alike = append $alike $one -}}{{- end -}}
{{- end -}}
{{- $names := join ", " $alike | default "one of files/model-shapes.yaml, such as qwen3-8b" -}}
{{- $why := "is no model the chart knows, so its KV cache has no known size" -}}
{{- if regexMatch "^(deepseek-v(3\\.2|4)|qwen3-next|qwen3\\.[5-9]|kimi-(k3|linear)|nemotron-h|jamba|falcon-h1|granite-4)" $file -}}
{{- $why = "keeps recurrent or compressed states beside its KV cache, whose blocks vLLM sizes when it starts; an engine's `spillway doctor` shows them as `row of the CPU tier`" -}}
{{- end -}}
{{- include "spillway.problem" (dict "problems" .problems "text" (printf "%s.model.path: %q %s; set %s.model.shape.layers, kvHeads and headDim (or latentDim for MLA) from its config.json, or %s.model.shape.preset to the known model that it is made from: %s" .path $model.path $why .path .path $names)) -}}
{{- include "spillway.overlay" (dict "base" .out "over" (dict "layers" 1 "kvHeads" 1 "headDim" 1)) -}}
{{- end -}}
{{- end -}}

{{/* engine -> workers of one replica; each has a device of its own. */}}
{{- define "spillway.ranks" -}}
{{- mul (int64 .tensorParallelSize) (int64 .pipelineParallelSize) (int64 .dataParallelSize) -}}
{{- end -}}

{{/* (engine, path, platform, shape, problems, out): every figure of one replica's memory into out. */}}
{{- define "spillway.memory" -}}
{{- $engine := .engine -}}{{- $shape := .shape -}}{{- $out := .out -}}{{- $problems := .problems -}}{{- $path := .path -}}
{{- $onCpu := eq .platform "cpu" -}}
{{- $elementBytes := dict "bfloat16" 2 "float16" 2 "float32" 4 -}}
{{- $dtype := $engine.model.dtype -}}
{{- if eq $dtype "auto" -}}
{{- /* A CPU engine takes bfloat16 where the core has it: reckon with the larger. */ -}}
{{- $dtype = ternary "float32" (ternary $shape.dtype "bfloat16" (has $shape.dtype (list "bfloat16" "float16"))) $onCpu -}}
{{- end -}}
{{- $element := get $elementBytes $dtype -}}
{{- /* Of the KV cache: its own dtype, and the scales that some keep for each head. */ -}}
{{- $kvDtype := ternary $dtype $engine.model.kvCacheDtype (eq $engine.model.kvCacheDtype "auto") -}}
{{- $kvElement := get $elementBytes $kvDtype | default 1 -}}
{{- $scale := ternary 4 0 (hasSuffix "_per_token_head" $kvDtype) -}}
{{- if and $shape.latentDim $scale -}}
{{- include "spillway.problem" (dict "problems" $problems "text" (printf "%s.model.kvCacheDtype: %s keeps a scale for each head, and this model's latent cache (MLA) has no heads; set it to auto or fp8" $path $kvDtype)) -}}
{{- end -}}
{{- $tensorRanks := int64 $engine.tensorParallelSize -}}{{- $stages := int64 $engine.pipelineParallelSize -}}
{{- $allRanks := include "spillway.ranks" $engine | int64 -}}
{{- /* Every data parallel rank is an engine core with a device cache, a CPU tier, weights and queues of its own. */ -}}
{{- $cores := int64 $engine.dataParallelSize -}}{{- $ranks := mul $tensorRanks $stages -}}
{{- /* A row of the CPU tier holds one KV group. vLLM makes groups of one size out of layers of two kinds: of the smaller
      kind's, or of the larger's where it is less than half as large again. */ -}}
{{- $sliding := int64 (default 0 $shape.slidingLayers) -}}{{- $full := sub (int64 $shape.layers) $sliding -}}
{{- $fewer := min $full $sliding -}}{{- $more := max $full $sliding -}}
{{- $groupLayers := ternary $more $fewer (or (eq $fewer 0) (lt (mul 2 $more) (mul 3 $fewer))) -}}
{{- $groups := add (div (add $full (sub $groupLayers 1)) $groupLayers) (div (add $sliding (sub $groupLayers 1)) $groupLayers) -}}
{{- /* Of the stage with the most layers: in a row every stage has its room. */ -}}
{{- $layers := div (add $groupLayers (sub $stages 1)) $stages -}}
{{- $rankTokenBytes := 0 -}}
{{- if $shape.latentDim -}}
{{- $rankTokenBytes = mul $layers (int64 $shape.latentDim) $kvElement -}}
{{- else -}}
{{- $heads := max 1 (div (int64 $shape.kvHeads) $tensorRanks) -}}
{{- $rankTokenBytes = mul 2 $layers $heads (add (mul (int64 $shape.headDim) $kvElement) $scale) -}}
{{- end -}}
{{- /* In every tier. All ranks of a stage hold the same latents (MLA), and a tier holds them once. */ -}}
{{- $rowTokenBytes := ternary (mul $rankTokenBytes $stages) (mul $rankTokenBytes $ranks) (not (not $shape.latentDim)) -}}
{{- $tokenBytes := mul $rowTokenBytes $groups -}}
{{- $blockSize := int64 $engine.blockSize -}}
{{- $blockBytes := mul $tokenBytes $blockSize -}}
{{- $maxLength := int64 $engine.model.maxLength -}}
{{- $longestBlocks := div (add $maxLength (sub $blockSize 1)) $blockSize -}}

{{- /* Device cache. A CPU engine gets a number, because its device memory is this pod's. */ -}}
{{- $deviceBlocks := $engine.deviceBlocks -}}
{{- if and $onCpu (not $deviceBlocks) -}}{{- $deviceBlocks = add1 (mul 4 $longestBlocks $groups) -}}{{- end -}}
{{- if $deviceBlocks -}}
{{- $deviceBlocks = int64 $deviceBlocks -}}
{{- if lt $deviceBlocks (add1 $longestBlocks) -}}
{{- include "spillway.problem" (dict "problems" $problems "text" (printf "%s.deviceBlocks: %d blocks of %d tokens hold no prompt of model.maxLength %d; set deviceBlocks >= %d or model.maxLength <= %d" $path $deviceBlocks $blockSize $maxLength (add1 $longestBlocks) (mul (sub $deviceBlocks 1) $blockSize))) -}}
{{- end -}}
{{- $_ := set $out "deviceBlocks" $deviceBlocks -}}
{{- end -}}
{{- $deviceBytes := ternary (mul (default 0 $deviceBlocks) $rankTokenBytes $allRanks $blockSize) 0 $onCpu -}}
{{- $coreWeights := int64 (include "spillway.bytes" (dict "value" $shape.weightBytes
  "path" (printf "%s.model.shape.weightBytes" $path))) -}}
{{- /* Quantised weights stay as the files have them, or become smaller. */ -}}
{{- if not (or $engine.model.quantization $shape.quantized) -}}
{{- $coreWeights = div (mul $coreWeights $element) (get $elementBytes $shape.dtype | default 2) -}}
{{- end -}}
{{- $weightBytes := ternary (mul $coreWeights $cores) 0 $onCpu -}}
{{- $asked := include "spillway.argumentMemory" (dict "arguments" (default list $engine.extraArgs) "onCpu" $onCpu
  "ranks" $ranks "cores" $cores "weightBytes" $coreWeights) | fromJson -}}
{{- $askedBytes := int64 $asked.processBytes -}}

{{- /* CPU tier: rows of one chunk of one KV group over all ranks, rounded up to a page. */ -}}
{{- $offload := $engine.offload -}}
{{- $chunkTokens := mul $blockSize (int64 $offload.blocksPerChunk) -}}
{{- $rowBytes := mul (div (add (mul $rowTokenBytes $chunkTokens) 4095) 4096) 4096 -}}
{{- $chunks := 0 -}}
{{- $tierKey := "offload.numCpuBlocks" -}}
{{- if $offload.enabled -}}
{{- if $offload.numCpuBlocks -}}
{{- $chunks = int64 $offload.numCpuBlocks -}}
{{- $most := div 9007199254740992 $rowBytes -}}
{{- if gt (float64 $offload.numCpuBlocks) (float64 $most) -}}
{{- include "spillway.problem" (dict "problems" $problems "text" (printf "%s.offload.numCpuBlocks: %.0f chunks of %s are more than 8 PiB; set it to what the host memory holds, %d or less" $path (float64 $offload.numCpuBlocks) (include "spillway.bytesText" $rowBytes) $most)) -}}
{{- $chunks = 1 -}}
{{- end -}}
{{- else if $offload.cpuBytes -}}
{{- $tierKey = "offload.cpuBytes" -}}
{{- $tierGiven := int64 (include "spillway.bytes" (dict "value" $offload.cpuBytes "path" (printf "%s.offload.cpuBytes" $path))) -}}
{{- $chunks = div $tierGiven $rowBytes -}}
{{- if eq $chunks 0 -}}
{{- include "spillway.problem" (dict "problems" $problems "text" (printf "%s.offload.cpuBytes: %s holds no chunk of %s (%d tokens x %d B); set it to %d or more, or lower blocksPerChunk" $path (include "spillway.bytesText" $tierGiven) (include "spillway.bytesText" $rowBytes) $chunkTokens $rowTokenBytes $rowBytes)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $tierBytes := mul $chunks $rowBytes $cores -}}
{{- $times := eq $cores 1 | ternary "" (printf "%d ranks x " $cores) -}}
{{- /* vLLM's own queues: about 40 MiB for the server and each rank are ever touched, 160 + 240 per rank are mapped. */ -}}
{{- $queueBytes := add (mul 41943040 (add1 $ranks) $cores) (int64 $asked.sharedBytes) -}}
{{- $sharedNeeded := add $tierBytes $queueBytes -}}
{{- $mapped := add (mul $cores (add 167772160 (mul 251658240 $ranks))) (int64 $asked.sharedBytes) -}}
{{- $sharedComfortable := div (mul (add $tierBytes $mapped) 110) 100 -}}
{{- $shared := $sharedComfortable -}}
{{- if $engine.memory.sharedMemory -}}
{{- $shared = int64 (include "spillway.bytes" (dict "value" $engine.memory.sharedMemory "path" (printf "%s.memory.sharedMemory" $path))) -}}
{{- if and (lt $shared $sharedNeeded) (not $engine.memory.force) -}}
{{- include "spillway.problem" (dict "problems" $problems "text" (printf "%s.memory.sharedMemory: %s cannot hold the CPU tier of %s (%s%d chunks x %s) and queues of %s; set it to %s or more, null to have it computed, or %s <= %s" $path (include "spillway.bytesText" $shared) (include "spillway.bytesText" $tierBytes) $times $chunks (include "spillway.bytesText" $rowBytes) (include "spillway.bytesText" $queueBytes) (include "spillway.quantity" $sharedNeeded) $tierKey (include "spillway.tierFitting" (dict "key" $tierKey "rowBytes" $rowBytes "free" (div (sub $shared $queueBytes) $cores))))) -}}
{{- end -}}
{{- end -}}

{{- $tier := $offload.sharedTier -}}
{{- /* Every engine core keeps copies of the index of slabs: 104 bytes for each slot, which is a row and a page. */ -}}
{{- $indexBytes := 0 -}}
{{- if and $offload.enabled (eq $tier.type "nvme") -}}{{- if ne $tier.nvme.mode "files" -}}
{{- with include "spillway.nvmeMaxBytes" (dict "item" (dict "engine" $engine "path" $path)) -}}
{{- if int64 . -}}{{- $indexBytes = mul (add (mul (div (int64 .) (add $rowBytes 4096)) 104) 2097152) $cores -}}{{- end -}}
{{- end -}}
{{- end -}}{{- end -}}

{{- /* What the engine itself reckons with at its start, and what this pod reserves. */ -}}
{{- $engineNeeds := add (mul 2411724800 $allRanks) $sharedNeeded $deviceBytes $weightBytes $askedBytes $indexBytes -}}
{{- $processText := ternary "2560MiB" "8GiB" $onCpu -}}
{{- $processBytes := mul $allRanks (int64 (include "spillway.bytes" (dict "value" (default $processText $engine.memory.processPerRank) "path" (printf "%s.memory.processPerRank" $path)))) -}}
{{- $stagingBytes := 0 -}}
{{- if and $offload.enabled (ne $tier.type "none") -}}
{{- /* Each thread: a chunk in flight, one on its way to or from the store, and a sealed one. */ -}}
{{- $stagingBytes = mul (int64 $tier.ioThreads) (ternary 3 2 $tier.encryption.enabled) $rowBytes $cores -}}
{{- if eq $tier.type "nvme" -}}
{{- $stagingBytes = add $stagingBytes (int64 (include "spillway.bytes" (dict "value" $engine.memory.pageCache "path" (printf "%s.memory.pageCache" $path)))) -}}
{{- end -}}
{{- end -}}
{{- $sum := add $sharedNeeded $processBytes $deviceBytes $weightBytes $stagingBytes $askedBytes $indexBytes -}}
{{- $needed := max $engineNeeds (div (mul $sum (add 100 (int64 $engine.memory.marginPercent))) 100) -}}
{{- $arithmetic := printf "CPU tier %s (%s%d chunks x %s) + queues %s + processes %s (%s)" (include "spillway.bytesText" $tierBytes) $times $chunks (include "spillway.bytesText" $rowBytes) (include "spillway.bytesText" $queueBytes) (include "spillway.bytesText" $processBytes) (eq $allRanks 1 | ternary "1 rank" (printf "%d ranks" $allRanks)) -}}
{{- if $onCpu -}}{{- $arithmetic = printf "%s + device blocks %s + weights %s" $arithmetic (include "spillway.bytesText" $deviceBytes) (include "spillway.bytesText" $weightBytes) -}}{{- end -}}
{{- if $stagingBytes -}}{{- $arithmetic = printf "%s + shared tier's buffers %s" $arithmetic (include "spillway.bytesText" $stagingBytes) -}}{{- end -}}
{{- if $indexBytes -}}{{- $arithmetic = printf "%s + its index %s" $arithmetic (include "spillway.bytesText" $indexBytes) -}}{{- end -}}
{{- if $askedBytes -}}
{{- $arithmetic = printf "%s + extraArgs %s" $arithmetic (include "spillway.bytesText" $askedBytes) -}}
{{- end -}}
{{- $arithmetic = printf "%s + %d %% margin = %s" $arithmetic (int64 $engine.memory.marginPercent) (include "spillway.bytesText" $needed) -}}
{{- $limit := $needed -}}
{{- if $engine.memory.limit -}}
{{- $given := int64 (include "spillway.bytes" (dict "value" $engine.memory.limit "path" (printf "%s.memory.limit" $path))) -}}
{{- if and $engine.memory.sharedMemory (gt $shared $given) (not $engine.memory.force) -}}
{{- include "spillway.problem" (dict "problems" $problems "text" (printf "%s.memory.sharedMemory: %s is more than memory.limit: %s, which it counts against; lower the first or raise the second" $path (include "spillway.bytesText" $shared) (include "spillway.bytesText" $given))) -}}
{{- end -}}
{{- $limit = int64 (include "spillway.bytes" (dict "value" $engine.memory.limit "path" (printf "%s.memory.limit" $path))) -}}
{{- if and (lt $limit $needed) (not $engine.memory.force) -}}
{{- $rest := sub (div (mul $limit 100) (add 100 (int64 $engine.memory.marginPercent))) (sub $sum $tierBytes) -}}
{{- include "spillway.problem" (dict "problems" $problems "text" (printf "%s.memory.limit: %s is too little: %s; set memory.limit >= %s, null to have it computed, or %s <= %s" $path (include "spillway.bytesText" $limit) $arithmetic (include "spillway.quantity" $needed) $tierKey (include "spillway.tierFitting" (dict "key" $tierKey "rowBytes" $rowBytes "free" (div $rest $cores))))) -}}
{{- end -}}
{{- end -}}

{{- if gt $cores 1 -}}{{- $_ := set $out "dataParallelRanks" $cores -}}{{- end -}}
{{- if gt $groups 1 -}}{{- $_ := set $out "kvGroups" $groups -}}{{- end -}}
{{- if $indexBytes -}}{{- $_ := set $out "tierIndexBytes" $indexBytes -}}{{- end -}}
{{- range $key, $value := dict "dtype" $dtype "kvDtype" $kvDtype "bytesPerToken" $tokenBytes "bytesPerBlock" $blockBytes "chunkTokens" $chunkTokens "cpuChunks" $chunks "cpuRowBytes" $rowBytes "cpuTierBytes" $tierBytes "cpuTierTokens" (mul (div $chunks $groups) $chunkTokens) "sharedMemoryNeededBytes" $sharedNeeded "sharedMemoryBytes" $shared "engineNeedsBytes" $engineNeeds "podNeedsBytes" $needed "memoryLimitBytes" $limit "arithmetic" $arithmetic -}}
{{- $_ := set $out $key $value -}}
{{- end -}}
{{- end -}}

{{/* (key, rowBytes, free) -> the largest tier that fits into `free` bytes, in the unit of `key`. */}}
{{- define "spillway.tierFitting" -}}
{{- $chunks := max 0 (div (int64 .free) (int64 .rowBytes)) -}}
{{- if eq .key "offload.cpuBytes" -}}{{ mul $chunks (int64 .rowBytes) }}{{- else -}}{{ $chunks }}{{- end -}}
{{- end -}}

{{/* (arguments, onCpu, ranks, cores, weightBytes) -> JSON: processBytes, sharedBytes: the host memory that arguments of
vLLM ask for, by services/engine/src/spillway_engine/argument_memory.py. */}}
{{- define "spillway.argumentMemory" -}}
{{- $arguments := .arguments -}}
{{- $number := dict -}}
{{- range list "--cpu-offload-gb" "--offload-group-size" "--offload-num-in-group" "--mm-processor-cache-gb" -}}
{{- $text := include "spillway.extraArgument" (dict "arguments" $arguments "name" .) -}}
{{- if regexMatch "^[+]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][-+]?[0-9]+)?$" $text -}}
{{- if lt (float64 $text) 1048576.0 -}}{{- $_ := set $number . (float64 $text) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- $kept := 0 -}}
{{- if not .onCpu -}}
{{- $group := get $number "--offload-group-size" | default 0.0 | int64 -}}
{{- $backend := include "spillway.extraArgument" (dict "arguments" $arguments "name" "--offload-backend") -}}
{{- if and (gt $group 0) (ne $backend "uva") -}}
{{- $layers := min $group (max 1 (get $number "--offload-num-in-group" | default 1.0 | int64)) -}}
{{- $kept = mul (div (mul .weightBytes $layers) $group) .cores -}}
{{- else -}}
{{- $kept = mul (mulf (get $number "--cpu-offload-gb" | default 0.0) 1073741824.0 | int64) .ranks .cores -}}
{{- end -}}
{{- $sleeps := false -}}
{{- range $arguments -}}{{- $sleeps = or $sleeps (eq "--enable-sleep-mode" (replace "_" "-" .)) -}}{{- end -}}
{{- if $sleeps -}}{{- $kept = add $kept (mul .weightBytes .cores) -}}{{- end -}}
{{- end -}}
{{- $cache := get $number "--mm-processor-cache-gb" -}}
{{- $shared := 0 -}}
{{- if eq "shm" (include "spillway.extraArgument" (dict "arguments" $arguments "name" "--mm-processor-cache-type")) -}}
{{- $shared = mulf (hasKey $number "--mm-processor-cache-gb" | ternary $cache 4.0) 1073741824.0 | int64 -}}
{{- else -}}
{{- $kept = add $kept (mul (mulf (default 0.0 $cache) 1073741824.0 | int64) (add1 .cores)) -}}
{{- end -}}
{{- dict "processBytes" $kept "sharedBytes" $shared | toJson -}}
{{- end -}}

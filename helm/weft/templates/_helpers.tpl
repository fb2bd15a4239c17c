{{/* The name of every object. KubeRay appends up to 16 characters to that of the RayService, and it must begin with a letter. */}}
{{- define "weft.fullname" -}}
{{- $name := default (ternary .Release.Name (printf "%s-%s" .Release.Name (default .Chart.Name .Values.nameOverride)) (contains (default .Chart.Name .Values.nameOverride) .Release.Name)) .Values.fullnameOverride -}}
{{- $name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "weft.selector" -}}
app.kubernetes.io/part-of: weft
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Labels of objects that are not pods. Pods must keep KubeRay's app.kubernetes.io/name, by which it finds the head. */}}
{{- define "weft.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/name: weft
{{ include "weft.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "weft.image" -}}
{{- $tag := default .Chart.AppVersion .Values.image.tag -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ $tag }}
{{- end -}}
{{- end }}

{{- define "weft.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "weft.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end }}

{{- define "weft.keysDir" -}}/etc/weft/keys{{- end }}
{{- define "weft.tlsDir" -}}/etc/weft/tls{{- end }}

{{/* The secret with the file of API keys, or nothing. */}}
{{- define "weft.keysSecret" -}}
{{- if .Values.apiKeys.existingSecret -}}
{{ .Values.apiKeys.existingSecret }}
{{- else if .Values.apiKeys.create -}}
{{ include "weft.fullname" . }}-keys
{{- end -}}
{{- end }}

{{/* The claim with the weights, or nothing. */}}
{{- define "weft.weightsClaim" -}}
{{- if .Values.weights.existingClaim -}}
{{ .Values.weights.existingClaim }}
{{- else if .Values.weights.create -}}
{{ include "weft.fullname" . }}-weights
{{- end -}}
{{- end }}

{{/* The config of Weft: the user's, with what the chart sets. It is the one place where the two meet. */}}
{{- define "weft.config" -}}
{{- $set := dict
  "server" (dict "host" (dig "server" "host" "0.0.0.0" .Values.config))
  "ray" (dict "address" "auto")
  "router" (dict "ray_resources" (dict "weft_router" 1))
  "encoders" (dict "ray_resources" (dict "weft_encoder" 1))
  "workers" (dict "ray_resources" (dict "weft_worker" 1))
  "network" (dict "metrics_port" (int .Values.metrics.port)) -}}
{{- $pools := dict -}}
{{- range $pool, $_ := .Values.config.more_workers -}}
{{- $_ := set $pools $pool (dict "ray_resources" (dict (printf "weft_worker-%s" $pool) 1)) -}}
{{- end -}}
{{- if $pools -}}{{- $_ := set $set "more_workers" $pools -}}{{- end -}}
{{- range $pool, $_ := .Values.workerPools -}}
{{- if not (hasKey $pools $pool) -}}
{{- fail (printf "workerPools has %s, which is no pool of config.more_workers" $pool) -}}
{{- end -}}
{{- end -}}
{{- if include "weft.keysSecret" . -}}
{{- $_ := set $set "access" (dict "keys_file" (printf "%s/%s" (include "weft.keysDir" .) .Values.apiKeys.key)) -}}
{{- end -}}
{{- if .Values.tls.existingSecret -}}
{{- $_ := set $set.server "tls_cert_file" (printf "%s/tls.crt" (include "weft.tlsDir" .)) -}}
{{- $_ := set $set.server "tls_key_file" (printf "%s/tls.key" (include "weft.tlsDir" .)) -}}
{{- if .Values.tls.clientCa -}}
{{- $_ := set $set.server "tls_client_ca_file" (printf "%s/ca.crt" (include "weft.tlsDir" .)) -}}
{{- end -}}
{{- end -}}
{{- toYaml (mergeOverwrite (deepCopy .Values.config) $set) -}}
{{- end }}

{{/* The keys of the config that may change without a restart, with their values. */}}
{{- define "weft.liveConfig" -}}
{{- $live := .Files.Get "files/live-keys.yaml" | fromYaml -}}
{{- $config := include "weft.config" . | fromYaml -}}
{{- $found := dict -}}
{{- range $live.sections -}}
{{- if hasKey $config . -}}{{- $_ := set $found . (get $config .) -}}{{- end -}}
{{- end -}}
{{- range $section, $keys := $live.keys -}}
{{- $values := dict -}}
{{- range $keys -}}
{{- if hasKey (default dict (get $config $section)) . -}}{{- $_ := set $values . (get (get $config $section) .) -}}{{- end -}}
{{- end -}}
{{- if $values -}}{{- $_ := set $found $section $values -}}{{- end -}}
{{- end -}}
{{- range $section, $keys := $live.named -}}
{{- $entries := dict -}}
{{- range $name, $entry := get $config $section | default dict -}}
{{- $values := dict -}}
{{- range $keys -}}{{- if hasKey $entry . -}}{{- $_ := set $values . (get $entry .) -}}{{- end -}}{{- end -}}
{{- if $values -}}{{- $_ := set $entries $name $values -}}{{- end -}}
{{- end -}}
{{- if $entries -}}{{- $_ := set $found $section $entries -}}{{- end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end }}

{{/* The rest of the config. A change of it starts every replica again. A number of replicas is 1 here unless it is 0,
because Serve takes the number from the deployments. */}}
{{- define "weft.fixedConfig" -}}
{{- $live := .Files.Get "files/live-keys.yaml" | fromYaml -}}
{{- $config := include "weft.config" . | fromYaml -}}
{{- range $live.sections -}}{{- $_ := unset $config . -}}{{- end -}}
{{- range $section, $keys := $live.keys -}}
{{- $values := default dict (get $config $section) -}}
{{- $replicas := get $values "replicas" -}}
{{- range $keys -}}{{- $_ := unset $values . -}}{{- end -}}
{{- if and (kindIs "float64" $replicas) (eq (int $replicas) 0) -}}{{- $_ := set $values "replicas" 0 -}}{{- end -}}
{{- if $values -}}{{- $_ := set $config $section $values -}}{{- else -}}{{- $_ := unset $config $section -}}{{- end -}}
{{- end -}}
{{- range $section, $keys := $live.named -}}
{{- range $name, $entry := get $config $section | default dict -}}
{{- range $keys -}}{{- $_ := unset $entry . -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $config -}}
{{- end }}

{{/* Weft's name on its Ray, which is also the name of the Serve application. */}}
{{- define "weft.clusterName" -}}
{{- dig "ray" "cluster_name" "weft" .Values.config -}}
{{- end }}

{{- define "weft.drainSeconds" -}}
{{- int (ceil (dig "server" "drain_s" 30 .Values.config | float64)) -}}
{{- end }}

{{/* An encoder finishes its calls, and then waits until workers have read what it holds: that is two drains. Serve then
gives a replica 15 s to stop (STOP_S in deploy/ray/serve_app.py), and the container gets 15 s more. */}}
{{- define "weft.graceSeconds" -}}
{{- $least := add (mul 2 (include "weft.drainSeconds" . | int)) 30 | int -}}
{{- if kindIs "invalid" .Values.terminationGracePeriodSeconds -}}
{{ $least }}
{{- else if lt (int .Values.terminationGracePeriodSeconds) $least -}}
{{- fail (printf "terminationGracePeriodSeconds is %d, but config.server.drain_s needs at least %d: twice the drain, and 30 s to stop" (int .Values.terminationGracePeriodSeconds) $least) -}}
{{- else -}}
{{ int .Values.terminationGracePeriodSeconds }}
{{- end -}}
{{- end }}

{{/* Names of all groups of workers as JSON: the first one, and one for each entry of config.more_workers. */}}
{{- define "weft.workerPools" -}}
{{- $found := list "" -}}
{{- range $name, $_ := .Values.config.more_workers -}}{{- $found = append $found $name -}}{{- end -}}
{{- toJson (dict "names" $found) -}}
{{- end }}

{{/* The name of the group and of the deployment of a pool. Takes `kind`, and for a further pool of workers `pool`. */}}
{{- define "weft.poolName" -}}
{{- if .pool -}}{{ .kind }}-{{ .pool }}{{- else -}}{{ .kind }}{{- end -}}
{{- end }}

{{/* The values of the pods of a pool as YAML: those of the kind, under those of workerPools. Takes root, kind, pool. */}}
{{- define "weft.poolValues" -}}
{{- $values := deepCopy (get .root.Values .kind) -}}
{{- if .pool -}}
{{- range $key, $value := get .root.Values.workerPools .pool | default dict -}}{{- $_ := set $values $key $value -}}{{- end -}}
{{- end -}}
{{- toYaml $values -}}
{{- end }}

{{/* Numbers of a pool as JSON: pods now, least and most, and what each pod offers. Takes the root, `kind` (encoder or worker), and for a further pool of workers `pool`. */}}
{{- define "weft.pool" -}}
{{- $section := get .root.Values.config (printf "%ss" .kind) | default dict -}}
{{- $path := printf "%ss" .kind -}}
{{- if .pool -}}
{{- $section = get .root.Values.config.more_workers .pool | default dict -}}
{{- $path = printf "more_workers.%s" .pool -}}
{{- end -}}
{{- $perPod := int (include "weft.poolValues" . | fromYaml).replicasPerPod -}}
{{- $ranks := 1 -}}
{{- if eq .kind "worker" -}}{{- $ranks = int (get $section "tensor_parallel" | default 1) -}}{{- end -}}
{{- $gpus := mulf $perPod $ranks (get $section "gpus_per_replica" | default 0 | float64) -}}
{{- $replicas := int (dig "replicas" 1 $section) -}}
{{- $most := int (dig "autoscaling" "max_replicas" 0 $section | default 0) -}}
{{- $least := $replicas -}}
{{- $now := $replicas -}}
{{- if $most -}}
{{- $least = int (dig "autoscaling" "min_replicas" 1 $section) -}}
{{- $now = $least -}}
{{- if not .root.Values.rayAutoscaler.enabled -}}{{- $now = $most -}}{{- $least = $most -}}{{- end -}}
{{- else -}}
{{- $most = $replicas -}}
{{- end -}}
{{- if ne (ceil $gpus) $gpus -}}
{{- fail (printf "%s.replicasPerPod is %d, and config.%s.gpus_per_replica is %v: a pod would need %v GPUs, which is not a whole number" (ternary (printf "workerPools.%s" .pool) .kind (not (empty .pool))) $perPod $path (get $section "gpus_per_replica") $gpus) -}}
{{- end -}}
{{- $result := dict
  "replicas" $replicas
  "isScaled" (gt (int (dig "autoscaling" "max_replicas" 0 $section | default 0)) 0)
  "units" (mul $perPod $ranks)
  "gpus" (int $gpus)
  "pods" (int (ceil (divf $now $perPod)))
  "minPods" (int (ceil (divf $least $perPod)))
  "maxPods" (int (ceil (divf $most $perPod))) -}}
{{- toJson $result -}}
{{- end }}

{{/* The environment of Ray's own processes, which the replicas' runtime_env comes too late for. */}}
{{- define "weft.env" -}}
- {name: HOME, value: /home/weft}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_SERVE_ENABLE_HA_PROXY, value: "0"}
- {name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO, value: "0"}
{{- if eq .Values.auth.mode "disabled" }}
- {name: RAY_AUTH_MODE, value: disabled}
{{- end }}
{{- with .Values.hubToken.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ . }}, key: {{ $.Values.hubToken.key }}}
{{- end }}
{{- end }}

{{/* A pod template. Takes root, kind, group (the values of the group), ports, probe, limits (of devices), isRdma. */}}
{{- define "weft.podTemplate" -}}
{{- $root := .root -}}
{{- $group := .group -}}
metadata:
  labels:
    {{- include "weft.selector" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .kind }}
    {{- with $group.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with merge (dict) $group.podAnnotations $root.Values.commonAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "weft.serviceAccountName" $root }}
  automountServiceAccountToken: {{ and (eq .kind "head") $root.Values.rayAutoscaler.enabled }}
  terminationGracePeriodSeconds: {{ include "weft.graceSeconds" $root }}
  enableServiceLinks: false
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- if $group.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  securityContext:
    {{- toYaml $root.Values.podSecurityContext | nindent 4 }}
  {{- range $key := list "nodeSelector" "affinity" "tolerations" "topologySpreadConstraints" }}
  {{- with get $group $key }}
  {{ $key }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- with $group.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $group.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  containers:
    - name: {{ ternary "ray-head" "ray-worker" (eq .kind "head") }}
      image: {{ include "weft.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      {{- $security := deepCopy $root.Values.containerSecurityContext }}
      {{- if and .isRdma $root.Values.rdma.ipcLock }}
      {{- $_ := set $security "capabilities" (merge (dict "add" (append (dig "capabilities" "add" list $security) "IPC_LOCK" | uniq)) (default dict $security.capabilities)) }}
      {{- end }}
      securityContext:
        {{- toYaml $security | nindent 8 }}
      ports:
        {{- range .ports }}
        - {{ toJson . }}
        {{- end }}
      env:
        {{- include "weft.env" $root | nindent 8 }}
        {{- with $group.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $group.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .probe }}
      readinessProbe:
        {{- . | nindent 8 }}
      {{- end }}
      lifecycle:
        preStop:
          exec:
            {{- if eq .kind "head" }}
            # The whole cluster ends. Requests have the drain to end, for which other pods need the head.
            command: [sleep, {{ include "weft.drainSeconds" $root | quote }}]
            {{- else }}
            command:
              - sh
              - -c
              - |
                {{- $root.Files.Get "files/leave_node.sh" | nindent 16 }}
              - leave-node
              - {{ include "weft.drainSeconds" $root | quote }}
              - {{ include "weft.graceSeconds" $root | quote }}
            {{- end }}
      {{- $resources := deepCopy $group.resources }}
      {{- with .limits }}
      {{- $_ := set $resources "limits" (merge (deepCopy .) (default dict $resources.limits)) }}
      {{- $_ := set $resources "requests" (merge (deepCopy .) (default dict $resources.requests)) }}
      {{- end }}
      resources:
        {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: home, mountPath: /home/weft}
        - {name: shm, mountPath: /dev/shm}
        {{- if include "weft.weightsClaim" $root }}
        - name: weights
          mountPath: {{ $root.Values.weights.mountPath }}
          readOnly: {{ $root.Values.weights.readOnly }}
          {{- with $root.Values.weights.subPath }}
          subPath: {{ . }}
          {{- end }}
        {{- end }}
        {{- if eq .kind "router" }}
        {{- if include "weft.keysSecret" $root }}
        - {name: keys, mountPath: {{ include "weft.keysDir" $root }}, readOnly: true}
        {{- end }}
        {{- if $root.Values.tls.existingSecret }}
        - {name: tls, mountPath: {{ include "weft.tlsDir" $root }}, readOnly: true}
        {{- end }}
        {{- end }}
        {{- with $group.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    # The root file system is read-only; these are what Ray, compilers and caches write to.
    - {name: tmp, emptyDir: {}}
    - {name: home, emptyDir: {}}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $group.shmSize }}}
    {{- with include "weft.weightsClaim" $root }}
    - name: weights
      persistentVolumeClaim: {claimName: {{ . }}, readOnly: {{ $root.Values.weights.readOnly }}}
    {{- end }}
    {{- if eq .kind "router" }}
    {{- with include "weft.keysSecret" $root }}
    - name: keys
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- with $root.Values.tls.existingSecret }}
    - name: tls
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- end }}
    {{- with $group.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* A worker group of a pool of encoders or LLM workers. Takes the root, the kind, and for a further pool `pool`. */}}
{{- define "weft.poolGroup" -}}
{{- $root := .root -}}
{{- $pool := include "weft.pool" . | fromJson -}}
{{- $group := include "weft.poolValues" . | fromYaml -}}
{{- $limits := dict -}}
{{- if $pool.gpus -}}{{- $_ := set $limits $group.gpuResource (int $pool.gpus) -}}{{- end -}}
{{- if and $root.Values.rdma.enabled $root.Values.rdma.resourceName -}}
{{- $_ := set $limits $root.Values.rdma.resourceName (int $root.Values.rdma.resourceCount) -}}
{{- end -}}
groupName: {{ include "weft.poolName" . }}
replicas: {{ $pool.pods }}
minReplicas: {{ $pool.minPods }}
maxReplicas: {{ $pool.maxPods }}
rayStartParams:
  num-gpus: {{ int $pool.gpus | quote }}
  resources: {{ printf "'{\"weft_%s\": %d}'" (include "weft.poolName" .) (int $pool.units) | quote }}
  {{- with $group.rayStartParams }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
template:
  {{- $ports := list (dict "name" "metrics" "containerPort" 8080) (dict "name" "weft-metrics" "containerPort" (int $root.Values.metrics.port)) }}
  {{- include "weft.podTemplate" (dict "root" $root "kind" .kind "group" $group "ports" $ports "probe" (include "weft.nodeProbe" $root) "limits" $limits "isRdma" $root.Values.rdma.enabled) | nindent 2 }}
{{- end }}

{{/* Whether Ray runs here. With a readiness probe of its own, a pod is not asked for a proxy of Serve by KubeRay. */}}
{{- define "weft.nodeProbe" -}}
httpGet: {path: /api/healthz, port: 52365}
initialDelaySeconds: 10
periodSeconds: 5
timeoutSeconds: 5
failureThreshold: 10
{{- end }}

{{/* Whether the router here takes requests. It fails as soon as the router drains. */}}
{{- define "weft.routerProbe" -}}
{{- if and .Values.tls.existingSecret .Values.tls.clientCa -}}
# The kubelet has no certificate for the router, so the probe can't see whether it drains.
tcpSocket: {port: http}
{{- else -}}
httpGet: {path: /health/ready, port: http, scheme: {{ ternary "HTTPS" "HTTP" (ne .Values.tls.existingSecret "") }}}
{{- end }}
initialDelaySeconds: 5
periodSeconds: 2
timeoutSeconds: 5
failureThreshold: 2
{{- end }}

{{/* Whether objects of Prometheus' operator are made: as the value says, or if it is null, if the cluster knows them. */}}
{{- define "weft.hasPrometheus" -}}
{{- if kindIs "invalid" .enabled -}}
{{- if .root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1" -}}true{{- end -}}
{{- else if .enabled -}}
true
{{- end -}}
{{- end }}

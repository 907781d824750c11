{{/* The pod of a replica of the API. */}}
{{- define "boost.apiTemplate" -}}
{{- $api := dict "root" . "component" "api" }}
metadata: {{- include "boost.podMetadata" (dict "root" . "component" "api" "of" .Values.api) | nindent 2 }}
spec:
  {{- include "boost.pullSecrets" . | nindent 2 }}
  serviceAccountName: {{ include "boost.serviceAccount" (dict "root" . "role" "api") }}
  automountServiceAccountToken: false # it asks nothing of Kubernetes
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ .Values.api.terminationGracePeriodSeconds }}
  securityContext: {{- include "boost.podSecurity" . | nindent 4 }}
  {{- with .Values.api.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.api.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  topologySpreadConstraints:
    {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
    - maxSkew: 1
      topologyKey: {{ . }}
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels: {{- include "boost.selector" $api | nindent 10 }}
    {{- end }}
  containers:
    - name: api
      image: {{ include "boost.image.api" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      command: [boost, serve]
      env:
        {{- include "boost.env.common" . | nindent 8 }}
        {{- include "boost.env.database" . | nindent 8 }}
        {{- include "boost.env.service" . | nindent 8 }}
      {{- include "boost.envFrom" . | nindent 6 }}
      ports:
        - name: http
          containerPort: 8900
      startupProbe:
        httpGet: &alive {path: /healthz, port: http, scheme: {{ include "boost.scheme" . | upper }}}
        periodSeconds: 2
        failureThreshold: 900 # SQLite's tables are brought up to date first
      livenessProbe:
        httpGet: *alive
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe: # not /readyz: while Ray is away, people look at their jobs and queue others
        httpGet: *alive
        periodSeconds: 5
        timeoutSeconds: 5
      {{- with .Values.api.drainSeconds }}
      lifecycle:
        preStop:
          sleep: # until nobody sends it requests any more
            seconds: {{ . }}
      {{- end }}
      resources: {{- toYaml .Values.api.resources | nindent 8 }}
      securityContext: {{- include "boost.containerSecurity" . | nindent 8 }}
      volumeMounts:
        - name: home
          mountPath: /var/lib/boost
        {{- if .Values.api.tls.existingSecret }}
        - name: tls
          mountPath: /etc/boost/tls
          readOnly: true
        {{- end }}
        {{- include "boost.sharedMounts" . | nindent 8 }}
  volumes:
    - name: home
      {{- if include "boost.usesPostgres" . }}
      emptyDir: {}
      {{- else }}
      persistentVolumeClaim:
        claimName: {{ include "boost.databaseClaim" . }}
      {{- end }}
    {{- with .Values.api.tls.existingSecret }}
    - name: tls
      secret:
        secretName: {{ . }}
        defaultMode: 0440
    {{- end }}
    {{- include "boost.sharedVolumes" (dict "root" . "sharedMemory" .Values.api.sharedMemory) | nindent 4 }}
{{- end -}}

{{/* The pod of a hook, which runs where replicas do and reaches what they reach: a replica's, with one container alone and
without the accounts, claims and Secrets that are not there yet at an installation. Given: root, name, command, resources. */}}
{{- define "boost.hookSpec" -}}
{{- $spec := (include "boost.apiTemplate" .root | fromYaml).spec -}}
{{- $missing := list -}}
{{- range $spec.volumes }}{{ if not (hasKey . "emptyDir") }}{{ $missing = append $missing .name }}{{ end }}{{ end -}}
{{- include "boost.openPod" (dict "of" "api" "spec" $spec "podSpec" .root.Values.api.podSpec) -}}
{{- $volumes := list -}}
{{- range $spec.volumes }}{{ if not (has .name $missing) }}{{ $volumes = append $volumes . }}{{ end }}{{ end -}}
{{- $api := first $spec.containers -}}
{{- $mounts := list -}}
{{- range $api.volumeMounts }}{{ if not (has .name $missing) }}{{ $mounts = append $mounts . }}{{ end }}{{ end -}}
{{- $container := merge (omit . "root") (pick $api "image" "imagePullPolicy" "env" "securityContext") (dict "volumeMounts" $mounts) -}}
{{- /* Rules about the replicas' own pods would keep a hook waiting for them, or for their end. */ -}}
{{- with $spec.affinity }}{{ $_ := set $spec "affinity" (pick . "nodeAffinity") }}{{ end -}}
{{- $own := dict "restartPolicy" "Never" "containers" (list $container) "volumes" $volumes -}}
{{- merge $own (omit $spec "serviceAccountName" "topologySpreadConstraints" "initContainers" "resources") | toYaml -}}
{{- end -}}

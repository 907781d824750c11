{{/* Names, labels and images. */}}

{{/* Short enough for KubeRay, which cuts the names of its Services after 50 letters. */}}
{{- define "boost.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What finds an object's pods: it never changes, because Kubernetes allows no change of it. */}}
{{- define "boost.selector" -}}
app.kubernetes.io/name: {{ .root.Values.nameOverride | default .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "boost.labels" -}}
{{ include "boost.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}{{ toYaml . | nindent 0 }}{{ end }}
{{- end -}}

{{/* An object's metadata. Given: root, component, name, and perhaps labels and annotations of its own. */}}
{{- define "boost.metadata" -}}
name: {{ .name }}
labels: {{- merge dict (.labels | default dict) (include "boost.labels" . | fromYaml) | toYaml | nindent 2 }}
{{- with merge dict (.annotations | default dict) .root.Values.commonAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "boost.image.api" -}}
{{- $tag := .Values.image.tag | default .Chart.AppVersion -}}
{{- include "boost.image" (dict "of" .Values.image "name" .Values.image.api "tag" $tag "digest" .Values.image.digest) -}}
{{- end -}}

{{- define "boost.image.trainer" -}}
{{- $tag := .Values.image.trainerTag | default .Values.image.tag | default .Chart.AppVersion -}}
{{- include "boost.image" (dict "of" .Values.image "name" .Values.image.trainer "tag" $tag "digest" .Values.image.trainerDigest) -}}
{{- end -}}

{{/* With a digest, the tag tells people the version; what is pulled is the digest's. */}}
{{- define "boost.image" -}}
{{- with .of.registry }}{{ . }}/{{ end }}{{ .name }}:{{ .tag }}{{ with .digest }}@{{ . }}{{ end -}}
{{- end -}}

{{/* An account by its role: api, head, workers. */}}
{{- define "boost.serviceAccount" -}}
{{- $account := index .root.Values.serviceAccounts .role -}}
{{- $account.existingName | default (printf "%s-%s" (include "boost.fullname" .root) .role) -}}
{{- end -}}

{{- define "boost.usesPostgres" -}}
{{- if .Values.database.existingSecret }}true{{ end -}}
{{- end -}}

{{- define "boost.rayTokenSecret" -}}
{{- .Values.ray.token.existingSecret | default (printf "%s-ray-token" (include "boost.fullname" .)) -}}
{{- end -}}

{{/* Annotations of what KubeRay needs to empty Redis once the cluster has been deleted, when Helm would have ended it, too. */}}
{{- define "boost.outlives" -}}
{{- if .Values.ray.gcsFaultTolerance.redisAddress }}helm.sh/resource-policy: keep{{ end -}}
{{- end -}}

{{/* Where the API finds Ray: KubeRay names the head's Service after the cluster. */}}
{{- define "boost.rayAddress" -}}
{{- if .Values.ray.enabled }}{{ include "boost.fullname" . }}-head-svc:6379{{ else }}{{ .Values.ray.address }}{{ end -}}
{{- end -}}

{{- define "boost.scheme" -}}
{{- if .Values.api.tls.existingSecret }}https{{ else }}http{{ end -}}
{{- end -}}

{{/* Where people find the service; empty if nobody has said. */}}
{{- define "boost.publicUrl" -}}
{{- if .Values.config.publicUrl -}}
{{- .Values.config.publicUrl -}}
{{- else if .Values.ingress.enabled -}}
{{- printf "https://%s" .Values.ingress.host -}}
{{- else if .Values.httpRoute.enabled -}}
{{- printf "https://%s" .Values.httpRoute.host -}}
{{- end -}}
{{- end -}}

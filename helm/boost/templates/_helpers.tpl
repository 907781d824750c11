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
{{- end -}}

{{- define "boost.image.api" -}}
{{- with .Values.image }}{{ with .registry }}{{ . }}/{{ end }}{{ .api }}:{{ .tag | default $.Chart.AppVersion }}{{ end -}}
{{- end -}}

{{- define "boost.image.trainer" -}}
{{- $tag := .Values.image.trainerTag | default .Values.image.tag | default .Chart.AppVersion -}}
{{- with .Values.image }}{{ with .registry }}{{ . }}/{{ end }}{{ .trainer }}:{{ $tag }}{{ end -}}
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
{{- end -}}
{{- end -}}

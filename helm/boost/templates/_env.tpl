{{/* Environment variables. */}}

{{- define "boost.env.common" -}}
{{- range $name, $value := merge dict .Values.env (dict "HOME" "/home/boost" "RAY_USAGE_STATS_ENABLED" "0") }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{- define "boost.envFrom" -}}
{{- with .Values.envFrom }}
envFrom:
{{- range . }}
  - secretRef:
      name: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "boost.env.database" -}}
{{- if include "boost.usesPostgres" . }}
- name: BOOST_DATABASE_URL
  valueFrom:
    secretKeyRef:
      name: {{ .Values.database.existingSecret }}
      key: {{ .Values.database.key }}
{{- end }}
{{- end -}}

{{/* The service's settings: those of the chart, and `config`, whose names become BOOST_…. */}}
{{- define "boost.env.service" -}}
- name: BOOST_HOME
  value: /var/lib/boost
- name: BOOST_HOST
  value: 0.0.0.0
- name: BOOST_PORT
  value: "8900"
{{- if .Values.api.tls.existingSecret }}
- name: BOOST_TLS_CERT
  value: /etc/boost/tls/tls.crt
- name: BOOST_TLS_KEY
  value: /etc/boost/tls/tls.key
{{- else }}
- name: BOOST_TLS
  value: "false"
{{- end }}
- name: BOOST_SECRETS_DIR
  value: /etc/boost/secrets
- name: BOOST_RAY_ADDRESS
  value: {{ include "boost.rayAddress" . }}
- name: BOOST_RAY_TOKEN_FILE
  value: /etc/boost/ray/token
{{- $config := deepCopy .Values.config }}
{{- if and .Values.ray.enabled .Values.ray.autoscaler.enabled }}{{ $_ := set $config "autoscaling" true }}{{ end }}
{{- if not $config.checkpointRoot }}{{ $_ := set $config "checkpointRoot" "file:///var/lib/boost-checkpoints" }}{{ end }}
{{- $_ := set $config "publicUrl" (include "boost.publicUrl" .) }}
{{- range $name, $value := $config }}
{{- if kindIs "slice" $value }}{{ $value = join "," $value }}{{ end }}
{{- if and (kindIs "float64" $value) (eq $value (floor $value)) }}{{ $value = int64 $value }}{{ end }}
{{- if not (or (kindIs "invalid" $value) (eq (toString $value) "")) }}
- name: BOOST_{{ $name | snakecase | upper }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "boost.env.ray" -}}
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN_PATH
  value: /etc/boost/ray/token
{{- end -}}

{{/* How Prometheus asks the API. */}}
{{- define "boost.prometheusAccess" -}}
{{- $tls := .Values.api.tls -}}
scheme: {{ include "boost.scheme" . }}
authorization:
  type: Bearer
  credentials:
    name: {{ .Values.monitoring.existingSecret }}
    key: {{ .Values.monitoring.key }}
{{- if $tls.existingSecret }}
tlsConfig:
  serverName: {{ include "boost.fullname" . }}.{{ .Release.Namespace }}.svc
  {{- with $tls.caKey }}
  ca:
    secret:
      name: {{ $tls.existingSecret }}
      key: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

# Prints the annotation artifacthub.io/changes of Chart.yaml: the first sentence of each entry of a section of
# CHANGELOG.md. The section is that of `version`, and "Unreleased" while that version has none.
#
#     awk -v version=0.1.0 -f charts/changelog_entries.awk CHANGELOG.md

function finish() {
  if (entry == "") return
  kind = kinds[heading]
  if (sub(/^\*\*Changed:\*\* /, "", entry)) kind = "changed"
  if (match(entry, /[.!?] [A-Z`*]/)) entry = substr(entry, 1, RSTART)
  gsub(/\*\*/, "", entry)
  gsub(/\\/, "&&", entry)
  gsub(/"/, "\\\"", entry)
  if (kind != "") text[section] = text[section] "    - {kind: " kind ", description: \"" entry "\"}\n"
  entry = ""
}

BEGIN {
  split("Added Changed Deprecated Removed Fixed Security", names, " ")
  for (number in names) kinds[names[number]] = tolower(names[number])
}
/^## /   { finish(); section = $2; heading = ""; next }
/^### /  { finish(); heading = $2; next }
/^- /    { finish(); entry = substr($0, 3); next }
/^  /    { if (entry != "") entry = entry " " substr($0, 3); next }
         { finish() }
END {
  finish()
  chosen = (version in text) ? version : "Unreleased"
  if (chosen in text) printf "  artifacthub.io/changes: |\n%s", text[chosen]
}

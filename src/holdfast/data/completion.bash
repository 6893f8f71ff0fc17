_holdfast() {
    local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" given="" before="" at="" words="" i
    local has_files=0 only_values=0
    COMPREPLY=()
    # --option=value is one word, or three if = ends a word.
    if [[ "$cur" == "=" ]]; then cur=""
    elif [[ "$prev" == "=" ]]; then prev="${COMP_WORDS[COMP_CWORD-2]}"
    elif [[ "$cur" == --*=* ]]; then before="${cur%%=*}="; prev="${cur%%=*}"; cur="${cur#*=}"; fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$at ${COMP_WORDS[i]}" in
            @COMMANDS@) at="$at ${COMP_WORDS[i]}" ;;
            *) break ;;
        esac
    done
    case "$at" in
@CASES@
    esac
    if [[ $only_values == 0 && "$cur" != -* ]]; then words="$given"; fi
    COMPREPLY=($(compgen -P "$before" -W "$words" -- "$cur"))
    # If nothing begins as typed, ignore case: qwen3 for Qwen3-8B, H1 for h100.
    if [[ ${#COMPREPLY[@]} == 0 && -n "$cur" && -n "$words" ]]; then
        COMPREPLY=($(compgen -W "$words" | typed="$cur" before="$before" awk \
            'index(tolower($0), tolower(ENVIRON["typed"])) == 1 { print ENVIRON["before"] $0 }'))
    fi
    if [[ $has_files == 1 ]]; then
        local IFS=$'\n'
        compopt -o filenames 2>/dev/null
        COMPREPLY+=($(compgen -P "$before" -f -- "$cur"))
    fi
}
complete -F _holdfast holdfast
